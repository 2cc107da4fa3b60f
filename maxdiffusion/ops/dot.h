// Matrix products.
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Precision of float32 products on TPU and GPU; DEFAULT allows bf16/tf32. From the key `precision`.
enum class Precision { default_, high, highest };

struct DotDims {
  Axes lhs_contract, rhs_contract, lhs_batch = {}, rhs_batch = {};
  Precision precision = Precision::default_;
  DType out = DType::f32;  // set by dot()
  bool operator==(const DotDims&) const = default;
};

/// Accumulation type of products: s32 for 8-bit integers, f32 for 8-bit floats, else the type itself.
DType sum_type(DType t);

/// Whether the CPU kernel is faster than compiled code for a product with this number of multiplications.
bool product_kernel_pays(const GraphOptions& options, DType type, double multiplications);

/// General dot: result axes are batch, then lhs free, then rhs free. dtypes must agree; the result has their sum_type
/// unless `accumulate` names a wider one (bf16 × bf16 → f32). Axes may be negative.
/// Gradient: two dots and a transpose each. Throws invalid_graph with both shapes and axes.
Tensor dot(Tensor a, Tensor b, DotDims dims);
Tensor dot(Tensor a, Tensor b, DotDims dims, DType accumulate);
/// y + b over the last axis of y. b: [n], or [y's first axis, n] if y has more than two axes. b has y's type, or
/// another type, which is converted to y's or added unconverted.
Tensor add_bias(Tensor y, Tensor b);
/// [..., M, K] × [..., K, N] with equal leading axes.
Tensor matmul(Tensor a, Tensor b, Precision p = Precision::default_);

}  // namespace md
