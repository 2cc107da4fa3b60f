#include "maxdiffusion/schedulers/consistency.h"

#include "maxdiffusion/schedulers/config_fields.h"

namespace md {

std::vector<double> distilled_timesteps(const nlohmann::json& config, int64_t steps) {
  const auto T = field<int64_t>(config, "num_train_timesteps", 1000),
             original = field<int64_t>(config, "original_inference_steps", 50);
  check(original >= 1 && original <= T, Code::invalid_config,
        "scheduler config: original_inference_steps is {}; expected 1 to num_train_timesteps = {}", original, T);
  check(steps >= 1 && steps <= original, Code::invalid_config,
        "num_inference_steps is {}; expected 1 to original_inference_steps = {}", steps, original);
  std::vector<double> t;
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t time = (original - i * original / steps) * (T / original) - 1;
    t.push_back(static_cast<double>(time));
  }
  return t;
}

}  // namespace md
