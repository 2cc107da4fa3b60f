// DPM-Solver++ for the reverse SDE: two model calls per step, at σ and at the geometric mean of σ and the next level;
// the x0 of the second call makes the step, which ends below the next level, and noise brings the sample back up to it.
// Noise: the increments of one Brownian motion over σ, as k-diffusion's BrownianTreeNoiseSampler defines them. The half
// step gets the increment from σ to the middle; the whole step gets the same one again and that from the middle to the
// next level. Their values are drawn from the seed of the sample, so that they differ from torchsde's for its seeds.
// Sources: Lu et al. 2022b, appendix on SDEs; k-diffusion (r = 1/2, η = 1); diffusers.

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/midpoint.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kDpmppSde = "DPMSolverSDEScheduler";

std::unique_ptr<Scheduler> make_dpmpp_sde(const nlohmann::json& config) {
  if (const auto seed = optional_number(config, "noise_sampler_seed"))
    log_warning("scheduler config: noise_sampler_seed={} is ignored: noise depends on the seed of the sample", *seed);

  auto plan = [grid = grid_to_zero(config)](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.spaced(steps);
    const std::string& type = grid.noise.prediction_type;
    const Form &start = k.history[0], &before_noise = k.history[1];
    LinearPlan p{.timesteps = {}, .steps = {}, .init_noise_sigma = sigma_init_noise(grid, l), .calls = 2};
    auto call = [&](double s, double timestep) {
      p.timesteps.push_back(timestep);
      p.steps.push_back({.level = {1, s}, .input_scale = sigma_input_scale(s), .x0 = {}, .next = {}});
      return Form(k.sample - s * sigma_derivative(type, s, k));
    };
    for (size_t i = 0; i < l.timesteps.size(); ++i) {
      const double s = l.sigmas[i], next = l.sigmas[i + 1];
      const Form x0 = call(s, l.timesteps[i]);
      if (next == 0) {
        p.steps.back().next = {x0, k.sample, x0};
        continue;
      }
      const double middle = std::sqrt(s * next);
      const MidpointStep half = ancestral_midpoint(s, middle), whole = ancestral_midpoint(s, next);
      const Form moved = half.end / s * k.sample + (1 - half.end / s) * x0;
      p.steps.back().next = {moved, k.sample, moved};
      p.steps.back().noise = half.noise;

      const Form second = call(middle, grid.timestep_of(middle));
      const double repeated = whole.noise * std::sqrt((s - middle) / (s - next)) / half.noise;
      p.steps.back().next = {
          whole.end / s * start + (1 - whole.end / s) * second + repeated * (k.sample - before_noise), start,
          before_noise};
      p.steps.back().noise = whole.noise * std::sqrt((middle - next) / (s - next));
    }
    return p;
  };
  return linear_sampler({.name = kDpmppSde, .history = 2, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass dpmpp_sde_sampler() {
  return {.name = kDpmppSde,
          .make = make_dpmpp_sde,
          .words = {{.word = "dpmpp_sde", .aliases = {"dpmpp_sde_gpu"}},
                    {"dpmpp_sde_karras", {{"use_karras_sigmas", true}}},
                    {"dpmpp_sde_exponential", {{"use_exponential_sigmas", true}}}},
          .fields = {"noise_sampler_seed"}};
}

}  // namespace md
