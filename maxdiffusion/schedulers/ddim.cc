// Denoising diffusion implicit models: jumps to x0, then back to the previous timestep along the predicted noise.
// Source: Song et al. 2021, equations 12 and 16.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/linear.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/spacing.h"

namespace md {
namespace {

constexpr const char* kDdim = "DDIMScheduler";

std::unique_ptr<Scheduler> make_ddim(const nlohmann::json& config) {
  require_no_sigma_schedule(config);
  const auto noise = NoiseSchedule::from_json(config);
  const auto spacing = choice(config, "timestep_spacing", "leading", {"linspace", "leading", "trailing"});
  const auto offset = field<int64_t>(config, "steps_offset", 0);
  const bool alpha_to_one = field(config, "set_alpha_to_one", true);
  const std::optional<Threshold> threshold = threshold_of(config);
  const double clip = threshold ? 0 : clip_range(config), eta = field(config, "eta", 0.0);
  check(eta >= 0, Code::invalid_config, "scheduler config: eta is {}; expected 0 or more", eta);

  auto plan = [=](int64_t steps, const Knowns& k) {
    const int64_t T = noise.num_train_timesteps;
    LinearPlan p{.timesteps = integer_timesteps(spacing, steps, T, offset), .steps = {}};
    for (double t : p.timesteps) {
      const double a = noise.alphas_cumprod[static_cast<size_t>(t)];
      const int64_t previous = static_cast<int64_t>(t) - T / steps;
      const double b = previous < 0 && alpha_to_one
                           ? 1.0
                           : noise.alphas_cumprod[static_cast<size_t>(std::max<int64_t>(previous, 0))];
      const Form x0 = predicted_x0(noise.prediction_type, std::sqrt(a), std::sqrt(1 - a), k);
      const Form epsilon = predicted_noise(noise.prediction_type, std::sqrt(a), std::sqrt(1 - a), k);
      const double spread = eta * std::sqrt(std::max(0.0, (1 - b) / (1 - a) * (1 - a / b)));
      const double back = std::sqrt(std::max(0.0, 1 - b - spread * spread));
      const Form& start = clip > 0 || threshold ? k.clipped : x0;
      p.steps.push_back(
          {.level = level_of(a), .x0 = x0, .next = {std::sqrt(b) * start + back * epsilon}, .noise = spread});
      if (clip == 0 && !threshold && eta == 0) p.steps.back().reaches = level_of(b);
    }
    return p;
  };
  return linear_sampler({.name = kDdim, .clip = clip, .threshold = threshold, .stochastic = eta > 0, .plan = plan});
}

}  // namespace

SamplerClass ddim_sampler() {
  return {
      .name = kDdim, .make = make_ddim, .words = {{"ddim"}}, .fields = {"eta", "set_alpha_to_one"}, .thresholds = true};
}

}  // namespace md
