// One update of parameters: the optimizer's rule on clipped gradients, or its kernel, then moving averages; all or
// nothing.
#pragma once

#include <vector>

#include "maxdiffusion/optim/clip.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {

/// Parameters that are updated together and what belongs to each of them, f32.
struct UpdateGroup {
  std::vector<Tensor> params;
  std::vector<std::vector<Tensor>> slots;  // for each slot of the optimizer, as params
  std::vector<Tensor> averages;            // as params, or empty
  std::vector<DimAxes> axes;               // mesh axes of each parameter
};
/// The group after an update. An absent gradient leaves its parameter, slots and average as they are.
UpdateGroup apply_update(const Optimizer& optimizer, const StepScalars& s, const ClippedGradients& grads,
                         UpdateGroup group);

}  // namespace md
