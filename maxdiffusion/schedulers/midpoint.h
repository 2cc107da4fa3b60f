// Samplers with σ that call the model twice per step: at σ, and at a level between σ and the end of the step; the slope
// or x0 of the second call makes the step from σ. The last step, to no noise, is Euler's.
#pragma once

#include <functional>

#include "maxdiffusion/schedulers/sigmas.h"

namespace md {

/// A step from σ: the model is called at `middle`; the step ends at `end`, where noise with standard deviation `noise`
/// is added.
struct MidpointStep {
  double middle = 0;  // 0: one call, Euler's step to `end`
  double end = 0, noise = 0;
};

/// σ and the next level → a step.
using MidpointRule = std::function<MidpointStep(double sigma, double next)>;

/// Ancestral: ends below `next`, and noise brings the sample back up to it. Source: k-diffusion, η = 1.
MidpointStep ancestral_midpoint(double sigma, double next);

/// `by_x0`: the second call's x0, not its slope, is held while the step is made (exponential integrator in log σ). The
/// sampler carries one array, the sample at σ.
LinearPlan midpoint_plan(const SigmaGrid& grid, int64_t steps, const Knowns& k, const MidpointRule& rule, bool by_x0);

}  // namespace md
