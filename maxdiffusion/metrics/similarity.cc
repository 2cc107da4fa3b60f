#include "maxdiffusion/metrics/similarity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

void check_alike(const HostArray& a, const HostArray& b) {
  check(a.dtype() == DType::u8 && a.shape() == b.shape() && a.shape().rank() >= 3, Code::invalid_config,
        "cannot compare {} with {}: expected two u8 [H, W, C] or [F, H, W, C] of one size", to_string(a.shape()),
        to_string(b.shape()));
}

/// Sums of `window` neighbours along the middle axis of v [outer, n, inner] → [outer, n − window + 1, inner].
std::vector<double> sums_along(const std::vector<double>& v, size_t n, size_t inner, size_t window) {
  const size_t outer = v.size() / (n * inner), left = n - window + 1;
  std::vector<double> out(outer * left * inner);
  for (size_t o = 0; o < outer; ++o)
    for (size_t i = 0; i < left; ++i)
      for (size_t k = 0; k < window; ++k) {
        const double* from = &v[(o * n + i + k) * inner];
        double* to = &out[(o * left + i) * inner];
        for (size_t j = 0; j < inner; ++j) to[j] += from[j];
      }
  return out;
}

}  // namespace

double structural_similarity(const HostArray& a, const HostArray& b) {
  check_alike(a, b);
  constexpr double kC1 = (0.01 * 255) * (0.01 * 255), kC2 = (0.03 * 255) * (0.03 * 255);
  const Dims& d = a.dims();
  const size_t axes = d.size() - 1, channels = static_cast<size_t>(d.back());
  const int64_t shortest = *std::min_element(d.begin(), d.end() - 1);
  const auto window = static_cast<size_t>(std::min<int64_t>(7, shortest - 1 + shortest % 2));
  const double count = std::pow(static_cast<double>(window), static_cast<double>(axes));
  auto means = [&](std::vector<double> v) {
    size_t inner = channels;
    for (size_t axis = axes; axis-- > 0;) {
      const auto n = static_cast<size_t>(d[axis]);
      v = sums_along(v, n, inner, window);
      inner *= n - window + 1;
    }
    for (double& x : v) x /= count;
    return v;
  };
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  std::vector<double> xx(x), yy(y), xy(x);
  for (size_t i = 0; i < x.size(); ++i) xx[i] *= x[i], yy[i] *= y[i], xy[i] *= y[i];
  const std::vector<double> mx = means(x), my = means(y), mxx = means(xx), myy = means(yy), mxy = means(xy);
  const double unbiased = count / std::max(count - 1, 1.0);
  double sum = 0;
  for (size_t i = 0; i < mx.size(); ++i) {
    const double vx = unbiased * (mxx[i] - mx[i] * mx[i]), vy = unbiased * (myy[i] - my[i] * my[i]),
                 vxy = unbiased * (mxy[i] - mx[i] * my[i]);
    sum += (2 * mx[i] * my[i] + kC1) * (2 * vxy + kC2) / ((mx[i] * mx[i] + my[i] * my[i] + kC1) * (vx + vy + kC2));
  }
  return sum / static_cast<double>(mx.size());
}

double peak_signal_to_noise(const HostArray& a, const HostArray& b) {
  check_alike(a, b);
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double error = 0;
  for (size_t i = 0; i < x.size(); ++i) error += (x[i] - y[i]) * (x[i] - y[i]);
  if (error == 0) return std::numeric_limits<double>::infinity();
  return 10 * std::log10(255.0 * 255.0 * static_cast<double>(x.size()) / error);
}

}  // namespace md
