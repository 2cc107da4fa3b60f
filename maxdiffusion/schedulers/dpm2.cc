// DPM-Solver-2 in the form of k-diffusion: the midpoint method in log σ, with two model calls per step.
// Sources: Karras et al. 2022, appendix; Lu et al. 2022a, algorithm 1.

#include <cmath>

#include "maxdiffusion/schedulers/midpoint.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kDpm2 = "KDPM2DiscreteScheduler";

std::unique_ptr<Scheduler> make_dpm2(const nlohmann::json& config) {
  SigmaGrid grid = grid_to_zero(config);
  grid.whole_karras = true;
  auto plan = [grid](int64_t steps, const Knowns& k) {
    auto between = [](double s, double next) { return MidpointStep{.middle = std::sqrt(s * next), .end = next}; };
    return midpoint_plan(grid, steps, k, between, false);
  };
  return linear_sampler({.name = kDpm2, .history = 1, .plan = plan});
}

}  // namespace

SamplerClass dpm2_sampler() {
  return {.name = kDpm2,
          .make = make_dpm2,
          .words = {{.word = "dpm2", .aliases = {"dpm_2", "kdpm2"}},
                    {"dpm2_karras", {{"use_karras_sigmas", true}}, {"dpm_2_karras"}}}};
}

}  // namespace md
