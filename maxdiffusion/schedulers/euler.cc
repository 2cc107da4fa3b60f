// Euler's method on the probability-flow ODE in the variable σ = √((1−ᾱ)/ᾱ): x += dx/dσ · (σ' − σ).
// Source: Karras et al. 2022, algorithm 2 without churn.

#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kEuler = "EulerDiscreteScheduler";

std::unique_ptr<Scheduler> make_euler(const nlohmann::json& config) {
  require_off(config, {"use_lu_lambdas", "use_flow_sigmas"});
  SigmaGrid grid = SigmaGrid::from_json(config);
  grid.log_linear = choice(config, "interpolation_type", "linear", {"linear", "log_linear"}) == "log_linear";
  const bool continuous = continuous_timesteps(config);

  auto plan = [=](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.spaced(steps);
    LinearPlan p{.timesteps = l.timesteps,
                 .steps = {},
                 .init_noise_sigma = sigma_init_noise(grid, l),
                 .training_timesteps = l.timesteps};
    for (size_t i = 0; i < l.timesteps.size(); ++i) {
      const double s = l.sigmas[i];
      if (continuous) p.timesteps[i] = 0.25 * std::log(s);
      const Form slope = sigma_derivative(grid.noise.prediction_type, s, k);
      p.steps.push_back({.level = {1, s},
                         .input_scale = sigma_input_scale(s),
                         .next = {k.sample + (l.sigmas[i + 1] - s) * slope},
                         .reaches = NoiseLevel{1, l.sigmas[i + 1]}});
    }
    return p;
  };
  return linear_sampler({.name = kEuler, .plan = plan});
}

}  // namespace

SamplerClass euler_sampler() {
  return {.name = kEuler,
          .make = make_euler,
          .words = {{.word = "euler", .flow_word = "flow_euler"}, {"euler_karras", {{"use_karras_sigmas", true}}}},
          .fields = {"interpolation_type", "timestep_type"}};
}

}  // namespace md
