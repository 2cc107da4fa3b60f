// Heun's method on the probability-flow ODE in σ: an Euler step, repeated from its start with the mean of the slopes at
// both ends; two model calls per step, one in the last, which ends without noise. Source: Karras et al. 2022, algorithm
// 1 without churn.

#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/midpoint.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kName = "HeunDiscreteScheduler";

std::unique_ptr<Scheduler> make(const nlohmann::json& config) {
  const double clip = field(config, "clip_sample", false) ? clip_range(config) : 0;

  auto plan = [grid = two_call_grid(config), clip](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.spaced(steps);
    const Form &start = k.history[0], &before = k.history[1];
    LinearPlan p{.timesteps = {}, .steps = {}, .init_noise_sigma = sigma_init_noise(grid, l), .calls = 2};
    auto call = [&](size_t i) {
      const double s = l.sigmas[i];
      const Form slope = sigma_derivative(grid.noise.prediction_type, s, k);
      p.timesteps.push_back(l.timesteps[i]);
      p.steps.push_back({.level = {1, s}, .input_scale = sigma_input_scale(s), .x0 = k.sample - s * slope, .next = {}});
      return clip > 0 ? Form((k.sample - k.clipped) / s) : slope;
    };
    for (size_t i = 0; i < l.timesteps.size(); ++i) {
      const double step = l.sigmas[i + 1] - l.sigmas[i];
      Form slope = call(i);
      p.steps.back().next = {k.sample + step * slope, k.sample, slope};
      if (i + 1 == l.timesteps.size()) break;
      slope = call(i + 1);
      p.steps.back().next = {start + step / 2 * (before + slope), start, before};
    }
    return p;
  };
  return linear_sampler({.name = kName, .history = 2, .clip = clip, .plan = plan});
}

}  // namespace

SamplerClass heun_sampler() {
  return {.name = kName,
          .make = make,
          .words = {{.word = "heun", .flow_word = "flow_heun"}, {"heun_karras", {{"use_karras_sigmas", true}}}}};
}

}  // namespace md
