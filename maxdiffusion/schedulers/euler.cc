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
  // EDM models get log σ as timestep. With other prediction types the switch is ignored, as in diffusers.
  const bool continuous = choice(config, "timestep_type", "discrete", {"discrete", "continuous"}) == "continuous" &&
                          grid.noise.prediction_type == "v_prediction";

  auto plan = [=](int64_t steps, const Knowns& k) {
    SigmaLevels l = grid.spaced(steps);
    if (continuous) {
      l.timesteps.clear();
      for (size_t i = 0; i + 1 < l.sigmas.size(); ++i) l.timesteps.push_back(0.25 * std::log(l.sigmas[i]));
    }
    LinearPlan p{.timesteps = l.timesteps, .steps = {}, .init_noise_sigma = sigma_init_noise(grid, l)};
    for (size_t i = 0; i < l.timesteps.size(); ++i) {
      const double s = l.sigmas[i];
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
