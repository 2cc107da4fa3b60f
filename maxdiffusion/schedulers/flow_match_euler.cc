// Euler's method for flow matching: x += (σ' − σ)·(ε − x0); with stochastic_sampling, jumps to x0 and back to σ' with
// new noise.
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/flow_levels.h"
#include "maxdiffusion/schedulers/linear.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kFlowMatchEuler = "FlowMatchEulerDiscreteScheduler";

std::unique_ptr<Scheduler> make_flow_match_euler(const nlohmann::json& config) {
  const FlowLevels levels = FlowLevels::from_json(config);
  const bool stochastic = field(config, "stochastic_sampling", false);

  auto plan = [=](int64_t steps, const Knowns& k) {
    const std::vector<double> sigmas = levels.sigmas(steps);
    LinearPlan p;
    for (size_t i = 0; i + 1 < sigmas.size(); ++i) {
      const double s = sigmas[i], next = sigmas[i + 1];
      p.timesteps.push_back(levels.timestep(s));
      if (stochastic)
        p.steps.push_back({.level = {1 - s, s}, .next = {(1 - next) * (k.sample - s * k.output)}, .noise = next});
      else
        p.steps.push_back(
            {.level = {1 - s, s}, .next = {k.sample + (next - s) * k.output}, .reaches = NoiseLevel{1 - next, next}});
    }
    return p;
  };
  return linear_sampler({.name = kFlowMatchEuler, .stochastic = stochastic, .plan = plan});
}

}  // namespace

SamplerClass flow_match_euler_sampler() {
  return {.name = kFlowMatchEuler,
          .make = make_flow_match_euler,
          .words = {{.word = "flow_euler", .aliases = {"flow_match_euler", "flowmatch_euler"}}},
          .fields = {"shift", "invert_sigmas", "stochastic_sampling"},
          .models = SamplerClass::flow,
          .shift = "shift"};
}

}  // namespace md
