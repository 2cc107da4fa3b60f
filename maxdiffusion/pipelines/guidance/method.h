// The registry entry of a guidance method: a new method is one file and one entry in registry.cc.
#pragma once

#include "maxdiffusion/pipelines/guidance.h"

namespace md {

/// A value of guidance_method.
struct GuidanceMethod {
  const char* name;
  /// Like guided().
  Guided (*combine)(const GuidanceKeys&, Tensor scale, Tensor negative, Tensor positive, Tensor momentum);
  /// Like finished(); null: the prediction is unchanged.
  Tensor (*finish)(const GuidanceKeys&, Tensor prediction, Tensor step) = nullptr;
};

/// The first of `steps` steps after this part of them, rounded down.
inline int64_t step_at(double part, int64_t steps) { return static_cast<int64_t>(part * static_cast<double>(steps)); }
/// All axes but the first.
Axes axes_of_sample(Tensor x);
/// x · scale; scale: f32 [].
Tensor scaled(Tensor x, Tensor scale);
/// Sum over these axes, kept as axes of size 1.
Tensor total_of_sample(Tensor x);

}  // namespace md
