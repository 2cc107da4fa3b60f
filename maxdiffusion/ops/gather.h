// Rows by index.
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md {

/// y = x[i, …]: x [N, …], indices: any integer shape I → y: I + x.dims[1:]. Out-of-range indices are clamped.
/// Gradient: scatter_add of the cotangent.
Tensor take(Tensor x, Tensor indices);
/// zeros[N, …] with rows of `updates` (shape I + rest) added at `indices` (shape I).
Tensor scatter_add(Tensor updates, Tensor indices, int64_t rows);
/// y[b] = x[b, i[b], …]: one row per batch element. x [B, N, …], i [B] → [B, …].
Tensor take_per_batch(Tensor x, Tensor indices);

}  // namespace md
