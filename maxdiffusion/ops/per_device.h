// Calls of kernels on meshes. The partitioner does not see into a call and would gather every operand of it, so each
// device calls the kernel with the parts that it holds (sdy.manual_computation).
#pragma once

#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Mesh axes of an array whose dims have these logical names, which must be as many; no names, or one device: whole.
DimAxes dim_axes(Tensor x, const LogicalAxes& names);

/// As kernels_support() (ops/custom_call.h), on one device or on each of a mesh.
bool kernels_support_shards(const std::vector<Tensor>& arrays);
/// Why a row of a table refuses a call that kernels_support_shards() does not take.
inline constexpr const char* kNoPartsForCpuKernels = "the arrays are not f32 or bf16 on CPU devices";

/// body(inputs) where there is one device. On a mesh each device has the parts of the inputs that `in` says, one entry
/// for each, and `body` makes of them its parts of the results. Gradient: differentiate outside (ops/custom_vjp.h).
std::vector<Tensor> each_part(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                              const std::vector<DimAxes>& out, const GraphFn& body);

/// The same, and as in Einstein's notation a result is summed over mesh axes that split an input and do not split it.
std::vector<Tensor> per_device(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                               const std::vector<DimAxes>& out, const GraphFn& body);

}  // namespace md
