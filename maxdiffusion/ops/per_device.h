// Kernel calls on meshes. The partitioner cannot partition a call and would gather every operand, so each device calls
// the kernel with its shards (sdy.manual_computation).
#pragma once

#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Mesh axes of an array with these logical axes, one per dim; no names, or one device: replicated.
DimAxes dim_axes(Tensor x, const LogicalAxes& names);

/// Like kernels_support() (ops/custom_call.h), on one device or on each of a mesh.
bool kernels_support_shards(const std::vector<Tensor>& arrays);
/// The reason of a row if kernels_support_shards() is false.
inline constexpr const char* kNoPartsForCpuKernels = "the arrays are not f32 or bf16 on CPU devices";

/// body(inputs) on one device. On a mesh, `body` maps each device's shards of the inputs (`in`, one entry each) to its
/// shards of the results (`out`). No gradient inside (ops/custom_vjp.h).
std::vector<Tensor> each_part(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                              const std::vector<DimAxes>& out, const GraphFn& body);

/// Like each_part; results are also summed over mesh axes that shard an input but not the result (as in einsum).
std::vector<Tensor> per_device(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                               const std::vector<DimAxes>& out, const GraphFn& body);

}  // namespace md
