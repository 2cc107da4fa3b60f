// Sampling of consistency-distilled flow-matching models: jumps to x0, then with new noise to the next level.
// Source: Luo et al. 2023, algorithm 3, for samples (1 − σ)·x0 + σ·ε.
#include <nlohmann/json.hpp>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/flow_levels.h"
#include "maxdiffusion/schedulers/linear.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kFlowMatchLcm = "FlowMatchLCMScheduler";

std::unique_ptr<Scheduler> make_flow_match_lcm(const nlohmann::json& config) {
  check(!config.contains("scale_factors") || config["scale_factors"].is_null(), Code::invalid_config,
        "scheduler config: scale_factors is given; expected null: samples that grow between steps are not supported");
  auto plan = [levels = FlowLevels::from_json(config)](int64_t steps, const Knowns& k) {
    const std::vector<double> sigmas = levels.sigmas(steps);
    LinearPlan p;
    for (size_t i = 0; i + 1 < sigmas.size(); ++i) {
      const double s = sigmas[i], next = sigmas[i + 1];
      p.timesteps.push_back(levels.timestep(s));
      p.steps.push_back({.level = {1 - s, s}, .next = {(1 - next) * (k.sample - s * k.output)}, .noise = next});
    }
    return p;
  };
  return linear_sampler({.name = kFlowMatchLcm, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass flow_match_lcm_sampler() {
  return {.name = kFlowMatchLcm,
          .make = make_flow_match_lcm,
          .words = {{.word = "flow_lcm", .aliases = {"flow_match_lcm", "flowmatch_lcm"}}},
          .fields = {"scale_factors", "upscale_mode"},
          .models = SamplerClass::flow,
          .shift = "shift"};
}

}  // namespace md
