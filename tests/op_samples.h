// Values and calls for the samples of operations (OpDef::samples).
#pragma once

#include <any>
#include <cmath>
#include <random>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/graph/op.h"

namespace md {

/// Uniform in [low, high], in the type of `shape`: integers are rounded, booleans are true for numbers above 0.
inline HostArray random_values(const Shape& shape, double low, double high, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(low, high);
  HostArray a(Shape{DType::f64, shape.dims});
  for (double& v : a.mutable_view<double>()) v = is_float(shape.dtype) ? uniform(random) : std::round(uniform(random));
  if (shape.dtype == DType::pred)
    for (double& v : a.mutable_view<double>()) v = v > 0;
  return a.cast(shape.dtype);
}

/// Applies an op, which may have no inputs.
inline std::vector<Tensor> apply_sample(const OpDef& op, Graph& g, const std::vector<Tensor>& in,
                                        const std::any& attributes) {
  if (!in.empty()) return apply_multi(op, in, attributes);
  return {apply_in(g, op, attributes)};
}

}  // namespace md
