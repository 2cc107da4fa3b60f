#include "maxdiffusion/schedulers/spacing.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"

namespace md {

std::vector<double> spaced_timesteps(const std::string& spacing, int64_t steps, int64_t T, int64_t offset) {
  check(steps >= 1 && steps <= T, Code::invalid_config,
        "scheduler: {} inference steps; expected 1 to num_train_timesteps = {}", steps, T);
  std::vector<double> t;
  const auto n = static_cast<double>(steps), last = static_cast<double>(T - 1);
  for (int64_t i = 0; i < steps; ++i) {
    const auto x = static_cast<double>(i);
    if (spacing == "linspace") {
      t.push_back(steps == 1 ? last : last * (n - 1 - x) / (n - 1));
    } else if (spacing == "leading") {
      t.push_back(std::min(last, static_cast<double>((steps - 1 - i) * (T / steps) + offset)));
    } else if (spacing == "trailing") {
      t.push_back(std::nearbyint(static_cast<double>(T) - x * (static_cast<double>(T) / n)) - 1);
    } else {
      fail(Code::invalid_config, "scheduler config: timestep_spacing is '{}'; known are linspace, leading, trailing",
           spacing);
    }
  }
  return t;
}

}  // namespace md
