// Euler's method in σ with ancestral noise: steps below the next level, then adds noise to reach it.
// Source: Karras et al. 2022, algorithm 2; the levels are k-diffusion's `get_ancestral_step` with η = 1.

#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kEulerAncestral = "EulerAncestralDiscreteScheduler";

std::unique_ptr<Scheduler> make_euler_ancestral(const nlohmann::json& config) {
  require_off(config, kSigmaSwitches);
  choice(config, "final_sigmas_type", "zero", {"zero"});

  auto plan = [grid = SigmaGrid::from_json(config)](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.spaced(steps);
    LinearPlan p{.timesteps = l.timesteps, .steps = {}, .init_noise_sigma = sigma_init_noise(grid, l)};
    for (size_t i = 0; i < l.timesteps.size(); ++i) {
      const double s = l.sigmas[i], next = l.sigmas[i + 1];
      const double up = next / s * std::sqrt(s * s - next * next), down = next * next / s;
      const Form slope = sigma_derivative(grid.noise.prediction_type, s, k);
      p.steps.push_back(
          {.level = {1, s}, .input_scale = sigma_input_scale(s), .next = {k.sample + (down - s) * slope}, .noise = up});
    }
    return p;
  };
  return linear_sampler({.name = kEulerAncestral, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass euler_ancestral_sampler() {
  return {.name = kEulerAncestral,
          .make = make_euler_ancestral,
          .words = {{.word = "euler_ancestral", .aliases = {"euler_a"}}}};
}

}  // namespace md
