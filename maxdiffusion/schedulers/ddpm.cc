// Ancestral sampling of denoising diffusion probabilistic models: the posterior of x_{t'} given x_t and x0, where t' is
// the next timestep of the schedule (not t − 1), so that sampling with fewer than T steps is correct too. The last step
// adds no noise.
// Source: Ho et al. 2020, equations 6–7 and algorithm 2; Nichol and Dhariwal 2021 for strided schedules.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/linear.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/spacing.h"

namespace md {
namespace {

constexpr const char* kDdpm = "DDPMScheduler";

std::unique_ptr<Scheduler> make_ddpm(const nlohmann::json& config) {
  require_no_sigma_schedule(config);
  const auto noise = NoiseSchedule::from_json(config);
  const auto spacing = choice(config, "timestep_spacing", "leading", {"linspace", "leading", "trailing"});
  const auto offset = field<int64_t>(config, "steps_offset", 0);
  const std::optional<Threshold> threshold = threshold_of(config);
  const double clip = threshold ? 0 : clip_range(config);
  // In diffusers the variants of one size differ only in how they are computed.
  const bool small = choice(config, "variance_type", "fixed_small",
                            {"fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"})
                         .starts_with("fixed_small");

  auto plan = [=](int64_t steps, const Knowns& k) {
    LinearPlan p{.timesteps = integer_timesteps(spacing, steps, noise.num_train_timesteps, offset), .steps = {}};
    for (size_t i = 0; i < p.timesteps.size(); ++i) {
      const bool last = i + 1 == p.timesteps.size();
      const double a = noise.alphas_cumprod[static_cast<size_t>(p.timesteps[i])];
      const double b = last ? 1.0 : noise.alphas_cumprod[static_cast<size_t>(p.timesteps[i + 1])];
      const double alpha = a / b, beta = 1 - alpha;  // from this timestep to the previous one of the schedule
      const Form x0 = predicted_x0(noise.prediction_type, std::sqrt(a), std::sqrt(1 - a), k);
      const Form& start = clip > 0 || threshold ? k.clipped : x0;
      const double variance = small ? std::max(1e-20, (1 - b) / (1 - a) * beta) : beta;
      p.steps.push_back(
          {.level = level_of(a),
           .x0 = x0,
           .next = {std::sqrt(b) * beta / (1 - a) * start + std::sqrt(alpha) * (1 - b) / (1 - a) * k.sample},
           .noise = last ? 0 : std::sqrt(variance)});
    }
    return p;
  };
  return linear_sampler({.name = kDdpm, .clip = clip, .threshold = threshold, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass ddpm_sampler() {
  return {.name = kDdpm, .make = make_ddpm, .words = {{"ddpm"}}, .fields = {"variance_type"}, .thresholds = true};
}

}  // namespace md
