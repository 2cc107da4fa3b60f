// DPM-Solver-2 with ancestral noise: steps below the next level, then adds noise to reach it.
// Sources: k-diffusion; Lu et al. 2022a, algorithm 1.

#include "maxdiffusion/schedulers/midpoint.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kDpm2Ancestral = "KDPM2AncestralDiscreteScheduler";

std::unique_ptr<Scheduler> make_dpm2_ancestral(const nlohmann::json& config) {
  SigmaGrid grid = grid_to_zero(config);
  grid.whole_karras = true;
  auto plan = [grid](int64_t steps, const Knowns& k) {
    return midpoint_plan(grid, steps, k, ancestral_midpoint, false);
  };
  return linear_sampler({.name = kDpm2Ancestral, .history = 1, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass dpm2_ancestral_sampler() {
  return {.name = kDpm2Ancestral,
          .make = make_dpm2_ancestral,
          .words = {{.word = "dpm2_ancestral", .aliases = {"dpm2_a", "dpm_2_a", "dpm_2_ancestral", "kdpm2_ancestral"}},
                    {"dpm2_ancestral_karras", {{"use_karras_sigmas", true}}, {"dpm2_a_karras"}}}};
}

}  // namespace md
