#include "maxdiffusion/ops/per_device.h"

#include <algorithm>

#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

bool splits(const std::string& axis, const DimAxes& dims) {
  return std::ranges::any_of(dims, [&](const auto& axes) { return std::ranges::count(axes, axis) > 0; });
}

}  // namespace

DimAxes dim_axes(Tensor x, const LogicalAxes& names) {
  const GraphOptions& o = x.graph().options();
  return o.one_device() || !o.resolve || names.empty() ? DimAxes(x.dims().size()) : o.resolve(names, x.dims());
}

bool kernels_support_shards(const std::vector<Tensor>& arrays) {
  const GraphOptions& o = arrays.front().graph().options();
  return o.cpu_kernels.callable && (o.one_device() || o.resolve) && one_kernel_type(arrays);
}

std::vector<Tensor> each_part(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                              const std::vector<DimAxes>& out, const GraphFn& body) {
  const GraphOptions& o = innermost(inputs).options();
  if (o.one_device()) return body(inputs);
  std::vector<std::string> all;
  for (const auto& [axis, size] : o.mesh_axes) all.push_back(axis);
  return manual_computation(inputs, in, out, all, body);
}

std::vector<Tensor> per_device(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                               const std::vector<DimAxes>& out, const GraphFn& body) {
  return each_part(inputs, in, out, [&](const std::vector<Tensor>& parts) {
    std::vector<Tensor> results = body(parts);
    for (size_t i = 0; i < results.size(); ++i) {
      std::vector<std::string> summed;
      for (const auto& axis : results[i].graph().options().mesh_axes)
        if (std::ranges::any_of(in, [&](const DimAxes& dims) { return splits(axis.first, dims); }) &&
            !splits(axis.first, out.at(i)))
          summed.push_back(axis.first);
      results[i] = all_reduce_sum(results[i], summed);
    }
    return results;
  });
}

}  // namespace md
