// DPM-Solver++(2S) with ancestral noise: two model calls per step; steps below the next level, then adds noise to reach
// it. diffusers has no such sampler; the class name is this program's.
// Sources: Lu et al. 2022b, algorithm 1, with r = 1/2; k-diffusion.

#include "maxdiffusion/schedulers/midpoint.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kDpmpp2sAncestral = "DPMSolver2SAncestralScheduler";

std::unique_ptr<Scheduler> make_dpmpp_2s_ancestral(const nlohmann::json& config) {
  auto plan = [grid = grid_to_zero(config)](int64_t steps, const Knowns& k) {
    return midpoint_plan(grid, steps, k, ancestral_midpoint, true);
  };
  return linear_sampler({.name = kDpmpp2sAncestral, .history = 1, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass dpmpp_2s_ancestral_sampler() {
  return {.name = kDpmpp2sAncestral,
          .make = make_dpmpp_2s_ancestral,
          .words = {{.word = "dpmpp_2s_ancestral", .aliases = {"dpmpp_2s_a"}},
                    {"dpmpp_2s_ancestral_karras", {{"use_karras_sigmas", true}}, {"dpmpp_2s_a_karras"}}}};
}

}  // namespace md
