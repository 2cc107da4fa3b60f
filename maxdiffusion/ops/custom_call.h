// Calls into handlers registered with the plugin (XLA FFI, typed API version 4), or into libraries known to the
// compiler.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/graph/graph.h"

namespace md {

/// Whether the arrays are all f32 or all bf16.
bool one_kernel_type(const std::vector<Tensor>& arrays);
/// Whether the CPU kernels of maxdiffusion/kernels can be called on these arrays: the graph is for one CPU device
/// (CpuKernels::callable), and the arrays are of one_kernel_type. On meshes: ops/per_device.h.
bool kernels_support(const std::vector<Tensor>& arrays);
/// The reason of a row (ops/kernel_table.h) if kernels_support() is false.
inline constexpr const char* kNotForCpuKernels = "the arrays are not f32 or bf16 on one CPU device";

/// For records that are a call on some platforms. Calls of maxdiffusion/kernels may be fused unless results are in
/// place.
std::vector<Value> emit_custom_call(EmitCtx& c, const std::vector<Value>& operands, const CustomCall& call);

/// Arrays per list in one call of a kernel on many arrays. XLA's aliasing analysis is cubic in this number: 5 s for
/// 400.
inline constexpr size_t kPerCall = 48;
/// A custom call of the handler. It has no gradient; wrap it with custom_vjp.
std::vector<Tensor> custom_call(Graph& g, const std::vector<Tensor>& inputs, CustomCall call);

}  // namespace md
