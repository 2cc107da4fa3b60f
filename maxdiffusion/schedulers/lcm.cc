// Latent consistency models: the model's x0, blended with the sample by the boundary condition of the consistency
// function, then with new noise to the next timestep. For few steps.
// Source: Luo et al. 2023, equation 9 and algorithm 3.

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/consistency.h"
#include "maxdiffusion/schedulers/linear.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kLcm = "LCMScheduler";

std::unique_ptr<Scheduler> make_lcm(const nlohmann::json& config) {
  require_no_sigma_schedule(config);
  const auto noise = NoiseSchedule::from_json(config);
  const double clip = field(config, "clip_sample", false) ? clip_range(config) : 0,
               scaling = field(config, "timestep_scaling", 10.0);

  auto plan = [=](int64_t steps, const Knowns& k) {
    LinearPlan p{.timesteps = distilled_timesteps(config, steps), .steps = {}};
    for (size_t i = 0; i < p.timesteps.size(); ++i) {
      const double t = p.timesteps[i], a = noise.alphas_cumprod[static_cast<size_t>(t)];
      const Form x0 = predicted_x0(noise.prediction_type, std::sqrt(a), std::sqrt(1 - a), k);
      constexpr double kData = 0.5;  // standard deviation of the data
      const double far = t * scaling, norm = far * far + kData * kData;
      const Form denoised = far / std::sqrt(norm) * (clip > 0 ? k.clipped : x0) + kData * kData / norm * k.sample;
      const bool last = i + 1 == p.timesteps.size();
      const double b = last ? 1 : noise.alphas_cumprod[static_cast<size_t>(p.timesteps[i + 1])];
      p.steps.push_back({.level = level_of(a), .x0 = x0, .next = {std::sqrt(b) * denoised}, .noise = std::sqrt(1 - b)});
    }
    return p;
  };
  return linear_sampler({.name = kLcm, .clip = clip, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass lcm_sampler() {
  return {.name = kLcm,
          .make = make_lcm,
          .words = {{.word = "lcm", .flow_word = "flow_lcm"}},
          .fields = {"original_inference_steps", "timestep_scaling", "set_alpha_to_one"}};
}

}  // namespace md
