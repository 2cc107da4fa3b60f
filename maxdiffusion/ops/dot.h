// Matrix products.
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md {

/// What XLA may do to float32 products on TPU and GPU; DEFAULT lets it use bf16/tf32. Read from the key `precision`.
enum class Precision { default_, high, highest };

struct DotDims {
  Axes lhs_contract, rhs_contract, lhs_batch = {}, rhs_batch = {};
  Precision precision = Precision::default_;
  DType out = DType::f32;  // set by dot()
  bool operator==(const DotDims&) const = default;
};

/// The type of sums of products: s32 of 8-bit integers, f32 of 8-bit floats, else the type itself.
DType sum_type(DType t);

/// Whether a product of so many multiplications is better a call of the CPU kernel than the compiler's own code, where
/// kernels can be called.
bool product_kernel_pays(const GraphOptions& options, DType type, double multiplications);

/// General dot: result axes are batch, then lhs free, then rhs free. dtypes must agree; the result has their sum_type
/// unless `accumulate` names a wider one (bf16 × bf16 → f32). Axes may be negative.
/// Gradient: two dots and a transpose each. Throws invalid_graph with both shapes and axes.
Tensor dot(Tensor a, Tensor b, DotDims dims);
Tensor dot(Tensor a, Tensor b, DotDims dims, DType accumulate);
/// y + b over the last axis of y; b: [n], or [y's first axis, n] where y has more than two. b is of y's type or
/// another, which is rounded to it or added as it is.
Tensor add_bias(Tensor y, Tensor b);
/// [..., M, K] × [..., K, N] with equal leading axes.
Tensor matmul(Tensor a, Tensor b, Precision p = Precision::default_);

}  // namespace md
