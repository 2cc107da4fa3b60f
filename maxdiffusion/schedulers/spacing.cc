#include "maxdiffusion/schedulers/spacing.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"

namespace md {

void check_steps(int64_t steps, int64_t T) {
  check(steps >= 1 && steps <= T, Code::invalid_config,
        "num_inference_steps is {}; expected 1 to num_train_timesteps = {}", steps, T);
}

std::vector<double> spaced_timesteps(const std::string& spacing, int64_t steps, int64_t T, int64_t offset) {
  check_steps(steps, T);
  std::vector<double> t;
  const auto n = static_cast<double>(steps), last = static_cast<double>(T - 1);
  for (int64_t i = 0; i < steps; ++i) {
    const auto x = static_cast<double>(i);
    if (spacing == "linspace") {
      t.push_back(steps == 1 ? last : last * (n - 1 - x) / (n - 1));
    } else if (spacing == "leading") {
      const int64_t stride = T / steps;
      t.push_back(std::clamp(static_cast<double>((steps - 1 - i) * stride + offset), 0.0, last));
    } else if (spacing == "trailing") {
      t.push_back(std::nearbyint(static_cast<double>(T) - x * (static_cast<double>(T) / n)) - 1);
    } else {
      fail(Code::invalid_config,
           "scheduler config: timestep_spacing is '{}'; expected one of: linspace, leading, trailing", spacing);
    }
  }
  return t;
}

std::vector<double> integer_timesteps(const std::string& spacing, int64_t steps, int64_t T, int64_t offset) {
  std::vector<double> t = spaced_timesteps(spacing, steps, T, offset);
  for (double& v : t) v = std::nearbyint(v);
  return t;
}

std::vector<double> multistep_timesteps(const std::string& spacing, int64_t steps, int64_t T, int64_t offset,
                                        int64_t end) {
  check_steps(steps, T);
  std::vector<double> t;
  if (spacing == "trailing") {
    for (double v : integer_timesteps(spacing, steps, T, 0))
      if (v - static_cast<double>(T - end) >= 0) t.push_back(v - static_cast<double>(T - end));
  } else {
    check(steps < end, Code::invalid_config, "num_inference_steps is {} with timestep_spacing {}; expected at most {}",
          steps, spacing, end - 1);
    t = integer_timesteps(spacing, steps + 1, end, offset);
    t.pop_back();
  }
  const auto twice = std::adjacent_find(t.begin(), t.end());
  check(twice == t.end(), Code::invalid_config,
        "num_inference_steps is {} with timestep_spacing {} and steps_offset {}: timestep {} repeats; expected fewer "
        "steps",
        steps, spacing, offset, twice == t.end() ? 0 : *twice);
  return t;
}

}  // namespace md
