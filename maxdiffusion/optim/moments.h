// Shared by optimizers with moments.
#pragma once

#include "maxdiffusion/optim/optimizer.h"

namespace md {

/// 1 − b^(updates+1). Through expm1: for b near 1 and small numbers the difference would lose most digits in f32.
Tensor bias_correction(double b, Tensor updates);

/// A call of AdamW's kernel, or of one with the same scalars and attributes.
FusedCall adamw_call(const char* kernel, double b1, double b2, double eps, double weight_decay, const StepScalars& s,
                     double max_value, Tensor factor);

}  // namespace md
