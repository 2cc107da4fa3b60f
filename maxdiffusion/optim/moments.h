// Shared by optimizers with moments.
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md {

/// 1 − b^(updates+1). Through expm1: for b near 1 and small numbers the difference would lose most digits in f32.
Tensor bias_correction(double b, Tensor updates);

}  // namespace md
