// Helpers to compare a device with this machine's CPU.
#pragma once

#include <cmath>
#include <vector>

#include "tests/one_device.h"

namespace md {

inline SharedDevices& kHostDevice = SharedDevices::add([] { return Devices::open(); });
inline const Devices& host_device() { return kHostDevice.get(); }

/// The largest ‖a − b‖ / ‖b‖; infinite if only one of two elements is a number.
inline double device_distance(const std::vector<HostArray>& a, const std::vector<HostArray>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const std::vector<double> x = a[i].to_doubles(), y = b[i].to_doubles();
    double differences = 0, squares = 0;
    for (size_t k = 0; k < x.size(); ++k) {
      squares += std::isfinite(y[k]) ? y[k] * y[k] : 0;
      if (x[k] == y[k] || (std::isnan(x[k]) && std::isnan(y[k]))) continue;
      differences += (x[k] - y[k]) * (x[k] - y[k]);
    }
    const double d = std::sqrt(differences / std::max(squares, 1e-12));
    worst = std::isfinite(d) ? std::max(worst, d) : HUGE_VAL;
  }
  return worst;
}

}  // namespace md
