// For tests: arrays whose values identify their checkpoint.
#pragma once

#include <algorithm>
#include <utility>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// An f32 array filled with one value, so that a mix of two checkpoints is detected.
inline HostArray filled(Dims dims, float value) {
  HostArray a(Shape{DType::f32, std::move(dims)});
  std::ranges::fill(a.mutable_view<float>(), value);
  return a;
}

}  // namespace md
