#include "maxdiffusion/schedulers/midpoint.h"

#include <cmath>

namespace md {

MidpointStep ancestral_midpoint(double sigma, double next) {
  const double up = next / sigma * std::sqrt(sigma * sigma - next * next), down = next * next / sigma;
  return {.middle = std::sqrt(sigma * down), .end = down, .noise = up};
}

LinearPlan midpoint_plan(const SigmaGrid& grid, int64_t steps, const Knowns& k, const MidpointRule& rule, bool by_x0) {
  const SigmaLevels l = grid.spaced(steps);
  const std::string& type = grid.noise.prediction_type;
  LinearPlan p{.timesteps = {}, .steps = {}, .init_noise_sigma = sigma_init_noise(grid, l), .calls = 2};
  for (size_t i = 0; i < l.timesteps.size(); ++i) {
    const double s = l.sigmas[i];
    const MidpointStep step = rule(s, l.sigmas[i + 1]);
    const bool two = step.middle > 0;
    p.timesteps.push_back(l.timesteps[i]);
    // A constant x0 while σ changes means a constant slope.
    p.steps.push_back(
        {.level = {1, s},
         .input_scale = sigma_input_scale(s),
         .x0 = {},
         .next = {k.sample + ((two ? step.middle : step.end) - s) * sigma_derivative(type, s, k), k.sample},
         .noise = two ? 0 : step.noise});
    if (!two) continue;
    const double m = step.middle;
    const Form slope = sigma_derivative(type, m, k), &start = k.history[0];
    p.timesteps.push_back(grid.timestep_of(m));
    const Form next = by_x0 ? Form(step.end / s * start + (1 - step.end / s) * (k.sample - m * slope))
                            : Form(start + (step.end - s) * slope);
    p.steps.push_back(
        {.level = {1, m}, .input_scale = sigma_input_scale(m), .x0 = {}, .next = {next, start}, .noise = step.noise});
  }
  return p;
}

}  // namespace md
