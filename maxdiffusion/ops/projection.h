// The matrix product of a linear layer, with the sharding of its arrays.
#pragma once

#include "maxdiffusion/ops/dot.h"

namespace md {

/// The name (ops/elementwise.h: named) of a product computed per device, for remat policies.
inline constexpr const char* kProjection = "projection";

/// y = x · wᵀ.   x: [..., in]   w: [out, in]   y: [..., out]. Leading axes are not flattened, so their sharding is
/// kept. Logical axes: `rows` of the first dims of x (further ones are replicated, the last is as in w), `of_w` of both
/// dims of the stored w. Only meshes of CPU devices use them, to call the kernel per device; elsewhere the partitioner
/// partitions a plain dot.
Tensor project(Tensor x, Tensor w, Precision precision, const LogicalAxes& rows, const LogicalAxes& of_w);

}  // namespace md
