// One update of parameters: the optimizer's rule on clipped gradients, or its kernel, then moving averages; applied
// completely or not at all.
#pragma once

#include <vector>

#include "maxdiffusion/optim/clip.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {

/// Parameters that are updated together, and their state arrays.
struct UpdateGroup {
  std::vector<Tensor> params;              // f32
  std::vector<std::vector<Tensor>> slots;  // arrays of each slot, parallel to params; empty for parameters without one
  std::vector<Tensor> averages;            // parallel to params, or empty
  std::vector<DimAxes> axes;               // mesh axes of each parameter
  std::vector<int64_t> stacked = {};       // ParamForm::stacked of each; empty: none is stacked
  std::vector<Tensor> scalars = {};        // of the optimizer
};
/// The group after an update. Without a gradient, a parameter, its slots and its average are unchanged.
UpdateGroup apply_update(const Optimizer& optimizer, const StepScalars& s, const ClippedGradients& grads,
                         UpdateGroup group);

}  // namespace md
