// Calls into handlers registered with the plugin (XLA FFI, typed API version 4), or into libraries that a compiler
// knows by name.
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
/// Why a row of a table (ops/kernel_table.h) refuses a call that kernels_support() does not take.
inline constexpr const char* kNotForCpuKernels = "the arrays are not f32 or bf16 on one CPU device";

/// For records that are a call on some platforms. Calls of maxdiffusion/kernels that write over nothing may become one.
std::vector<Value> emit_custom_call(EmitCtx& c, const std::vector<Value>& operands, const CustomCall& call);

/// Arrays of each kind per call of a kernel that takes many. The compiler's analysis of results that share memory with
/// operands is cubic in this number: 400 cost 5 s, 50 nothing.
inline constexpr size_t kPerCall = 48;
/// No gradient of its own: wrap it with custom_vjp for one.
std::vector<Tensor> custom_call(Graph& g, const std::vector<Tensor>& inputs, CustomCall call);

}  // namespace md
