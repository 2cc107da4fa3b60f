// Calls into handlers registered with the plugin (XLA FFI, typed API version 4), or into libraries that a compiler
// knows by name.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/graph/graph.h"

namespace md {

/// Operands and results are dense; operands are row-major, and so are results unless they say otherwise.
struct CustomCall {
  std::string target;  // the name it was registered under
  std::vector<Shape> results;
  std::string backend_config;      // inside of an MLIR dictionary: `scale = 1.0 : f32`
  bool config_is_text = false;     // backend_config is a text of the target's own, as before FFI (API version 2)
  std::vector<Axes> layouts = {};  // of each result, axes from the fastest to the slowest; empty: row-major
  bool has_side_effect = false;
  std::vector<std::pair<int, int>> in_place = {};  // (result, operand): the result is written over the operand
};

/// Whether the arrays are all f32 or all bf16.
bool one_kernel_type(const std::vector<Tensor>& arrays);
/// Whether the CPU kernels of maxdiffusion/kernels can be called on these arrays: the graph is for one CPU device
/// (CpuKernels::callable), and the arrays are of one_kernel_type. On meshes: ops/per_device.h.
bool kernels_take(const std::vector<Tensor>& arrays);
/// Why a row of a table (ops/kernel_table.h) refuses a call that kernels_take() does not take.
inline constexpr const char* kNotForCpuKernels = "the arrays are not f32 or bf16 on one CPU device";

/// For records that are a call on some platforms.
std::vector<Value> emit_custom_call(EmitCtx& c, const std::vector<Value>& operands, const CustomCall& call);

/// No gradient of its own: wrap it with custom_vjp for one.
std::vector<Tensor> custom_call(Graph& g, const std::vector<Tensor>& inputs, CustomCall call);

}  // namespace md
