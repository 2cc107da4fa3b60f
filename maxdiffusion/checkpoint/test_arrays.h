// For tests: arrays that say which checkpoint they are of.
#pragma once

#include <algorithm>
#include <utility>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// f32, all of one value, so that a mixture of two would show.
inline HostArray filled(Dims dims, float value) {
  HostArray a(Shape{DType::f32, std::move(dims)});
  std::ranges::fill(a.mutable_view<float>(), value);
  return a;
}

}  // namespace md
