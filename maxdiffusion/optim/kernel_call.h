// When the update is done by kernels of kernels/, and in what portions.
#pragma once

#include <cstddef>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Arrays of each kind per kernel call. The compiler's analysis of results that share memory with operands is cubic in
/// this number: 400 cost 5 s, 50 nothing.
inline constexpr size_t kPerCall = 48;

/// Whether the graph will run where kernels answer, and the arrays are of one type that they know: f32 or bf16.
inline bool kernels_take(const std::vector<Tensor>& arrays) {
  const Tensor first = arrays.front();
  if (!first.graph().options().cpu_kernels || (first.dtype() != DType::f32 && first.dtype() != DType::bf16))
    return false;
  for (Tensor t : arrays)
    if (t.dtype() != first.dtype()) return false;
  return true;
}

}  // namespace md
