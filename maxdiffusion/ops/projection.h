// The product of a linear layer, which knows how its arrays lie on meshes.
#pragma once

#include "maxdiffusion/ops/dot.h"

namespace md {

/// The name (ops/elementwise.h: named) of a product that devices make of their parts, so that remat policies know it.
inline constexpr const char* kProjection = "projection";

/// y = x · wᵀ.   x: [..., in]   w: [out, in]   y: [..., out]. Nothing is flattened, so that sharded leading axes stay
/// apart. Logical names: `rows` of the first dims of x, those behind it and the last being whole or as w says, and
/// `of_w` of both dims of w as it is stored. They are read on meshes of CPU devices, where each calls the kernel with
/// its parts; elsewhere the partitioner splits what is a plain dot.
Tensor project(Tensor x, Tensor w, Precision precision, const LogicalAxes& rows, const LogicalAxes& of_w);

}  // namespace md
