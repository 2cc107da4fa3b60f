// Trajectory consistency distillation: moves along the model's noise to a timestep below the next one, then adds new
// noise to reach it. `eta` (γ in the paper) is how far below: 0 adds no noise, 1 goes through x0 as LCM does. Source:
// Zheng et al. 2024, algorithm 2 (strategic stochastic sampling).

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/consistency.h"
#include "maxdiffusion/schedulers/linear.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kTcd = "TCDScheduler";

std::unique_ptr<Scheduler> make_tcd(const nlohmann::json& config) {
  require_no_sigma_schedule(config);
  const auto noise = NoiseSchedule::from_json(config);
  const double eta = field(config, "eta", 0.3);
  check(eta >= 0 && eta <= 1, Code::invalid_config, "scheduler config: eta is {}; expected 0 to 1", eta);

  auto plan = [=](int64_t steps, const Knowns& k) {
    LinearPlan p{.timesteps = distilled_timesteps(config, steps), .steps = {}};
    auto abar = [&](double t) { return noise.alphas_cumprod[static_cast<size_t>(t)]; };
    for (size_t i = 0; i < p.timesteps.size(); ++i) {
      const bool last = i + 1 == p.timesteps.size();
      const double next = last ? 0 : p.timesteps[i + 1];
      const double a = abar(p.timesteps[i]), below = abar(std::floor((1 - eta) * next)), b = last ? below : abar(next);
      const Form x0 = predicted_x0(noise.prediction_type, std::sqrt(a), std::sqrt(1 - a), k),
                 epsilon = predicted_noise(noise.prediction_type, std::sqrt(a), std::sqrt(1 - a), k);
      const Form intermediate = std::sqrt(below) * x0 + std::sqrt(1 - below) * epsilon;
      p.steps.push_back({.level = level_of(a),
                         .x0 = {},
                         .next = {std::sqrt(b / below) * intermediate},
                         .noise = std::sqrt(1 - b / below)});
    }
    return p;
  };
  return linear_sampler({.name = kTcd, .stochastic = eta > 0, .plan = plan});
}

}  // namespace

SamplerClass tcd_sampler() {
  return {.name = kTcd,
          .make = make_tcd,
          .words = {{"tcd"}},
          .fields = {"eta", "original_inference_steps", "timestep_scaling", "set_alpha_to_one"}};
}

}  // namespace md
