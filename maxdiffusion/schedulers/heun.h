// Heun's method in σ, for samplers that choose the levels of its steps.
#pragma once

#include <vector>

#include "maxdiffusion/schedulers/sigmas.h"

namespace md {

/// A step from one level to a lower one, or to 0. `noise`: standard deviation of noise added at its end.
struct HeunStep {
  double sigma, next;
  double timestep, next_timestep;  // of the two levels; the second is not used for next = 0
  double noise = 0;
};

/// Two model calls per step, at both ends; one for a step to 0, which must be the last. `clip` > 0: x0 is clipped to
/// ±clip (LinearSampler::clip). The sampler carries two arrays.
LinearPlan heun_plan(const SigmaGrid& grid, const std::vector<HeunStep>& steps, double clip, const Knowns& k);

/// The steps along `levels`.
std::vector<HeunStep> heun_steps(const SigmaLevels& levels);

}  // namespace md
