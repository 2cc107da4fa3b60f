// Heun's method for flow matching: an Euler step, repeated from its start with the mean of the slopes at both ends; two
// model calls per step, one in the last. Source: Karras et al. 2022, algorithm 1, for the ODE of flow matching; churn
// is off, as in diffusers by default.
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/flow_levels.h"
#include "maxdiffusion/schedulers/linear.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kFlowMatchHeun = "FlowMatchHeunDiscreteScheduler";

std::unique_ptr<Scheduler> make_flow_match_heun(const nlohmann::json& config) {
  auto plan = [levels = FlowLevels::from_json(config)](int64_t steps, const Knowns& k) {
    const std::vector<double> sigmas = levels.sigmas(steps);
    const Form &start = k.history[0], &slope = k.history[1];
    LinearPlan p{.timesteps = {}, .steps = {}, .calls = 2};
    for (size_t i = 0; i + 1 < sigmas.size(); ++i) {
      const double s = sigmas[i], next = sigmas[i + 1], step = next - s;
      p.timesteps.push_back(levels.timestep(s));
      p.steps.push_back({.level = {1 - s, s}, .next = {k.sample + step * k.output, k.sample, k.output}});
      if (i + 2 == sigmas.size()) break;
      p.timesteps.push_back(levels.timestep(next));
      p.steps.push_back({.level = {1 - next, next}, .next = {start + step / 2 * (slope + k.output), start, slope}});
    }
    return p;
  };
  return linear_sampler({.name = kFlowMatchHeun, .history = 2, .plan = plan});
}

}  // namespace

SamplerClass flow_match_heun_sampler() {
  return {.name = kFlowMatchHeun,
          .make = make_flow_match_heun,
          .words = {{.word = "flow_heun", .aliases = {"flow_match_heun", "flowmatch_heun"}}},
          .models = SamplerClass::flow,
          .shift = "shift"};
}

}  // namespace md
