// Heun's method on the probability-flow ODE in σ: an Euler step, repeated from its start with the mean of the slopes at
// both ends; two model calls per step, one in the last, which ends without noise. Source: Karras et al. 2022, algorithm
// 1 without churn.

#include "maxdiffusion/schedulers/heun.h"

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/midpoint.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {

std::vector<HeunStep> heun_steps(const SigmaLevels& levels) {
  std::vector<HeunStep> steps;
  for (size_t i = 0, n = levels.timesteps.size(); i < n; ++i)
    steps.push_back(
        {levels.sigmas[i], levels.sigmas[i + 1], levels.timesteps[i], i + 1 < n ? levels.timesteps[i + 1] : 0});
  return steps;
}

LinearPlan heun_plan(const SigmaGrid& grid, const std::vector<HeunStep>& steps, double clip, const Knowns& k) {
  const Form &start = k.history[0], &before = k.history[1];
  LinearPlan p{.timesteps = {}, .steps = {}, .calls = 2};
  auto call = [&](double s, double timestep) {
    const Form slope = sigma_derivative(grid.noise.prediction_type, s, k);
    p.timesteps.push_back(timestep);
    p.steps.push_back({.level = {1, s}, .input_scale = sigma_input_scale(s), .x0 = k.sample - s * slope, .next = {}});
    return clip > 0 ? Form((k.sample - k.clipped) / s) : slope;
  };
  for (const HeunStep& step : steps) {
    const double by = step.next - step.sigma;
    Form slope = call(step.sigma, step.timestep);
    p.steps.back().next = {k.sample + by * slope, k.sample, slope};
    if (step.next == 0) break;
    slope = call(step.next, step.next_timestep);
    p.steps.back().next = {start + by / 2 * (before + slope), start, before};
    p.steps.back().noise = step.noise;
  }
  return p;
}

namespace {

constexpr const char* kHeun = "HeunDiscreteScheduler";

std::unique_ptr<Scheduler> make_heun(const nlohmann::json& config) {
  const double clip = field(config, "clip_sample", false) ? clip_range(config) : 0;

  auto plan = [grid = grid_to_zero(config), clip](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.spaced(steps);
    LinearPlan p = heun_plan(grid, heun_steps(l), clip, k);
    p.init_noise_sigma = sigma_init_noise(grid, l);
    return p;
  };
  return linear_sampler({.name = kHeun, .history = 2, .clip = clip, .plan = plan});
}

}  // namespace

SamplerClass heun_sampler() {
  return {.name = kHeun,
          .make = make_heun,
          .words = {{.word = "heun", .flow_word = "flow_heun"}, {"heun_karras", {{"use_karras_sigmas", true}}}}};
}

}  // namespace md
