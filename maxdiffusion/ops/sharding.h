// Where tensors live on the mesh, and code that runs per device. Prints Shardy (sdy) text.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Sharding constraint by logical names, resolved by the rules the graph was opened with; "" keeps an axis whole.
/// The identity on one device. Throws invalid_graph on a name without a rule. Gradient: this constraint on the
/// cotangent.
Tensor shard(Tensor x, const LogicalAxes& names);
/// Sharding constraint by mesh axes, on the value and on its cotangent.
Tensor shard_axes(Tensor x, DimAxes axes);
/// Sharding constraint by mesh axes: `axes` on the value, `cotangent` on its cotangent.
Tensor shard_axes(Tensor x, DimAxes axes, DimAxes cotangent);
/// Mesh axes of a weight with these logical names while computation uses it: of those that it is stored over, `tensor`.
DimAxes axes_in_use(Tensor weight, const LogicalAxes& names);
/// A stored weight as computation uses it: whole along every mesh axis but `tensor` (gathered, as ZeRO-3 does), while
/// its gradient is split as it is stored. Said outright because XLA's partitioner, left to choose when batch and weight
/// are split over the same axis, picks poor plans, and on three axes a wrong one (its dots then permute the batch).
Tensor gather_weight(Tensor weight, const LogicalAxes& names);
/// A weight's gradient, split as the weight with these logical names is stored.
Tensor shard_as_stored(Tensor gradient, const LogicalAxes& names);

/// Code per device over `manual` mesh axes (sdy.manual_computation): the body sees local shapes and may use the
/// collectives below. `in`/`out`: mesh axes per dim of each argument and result.
std::vector<Tensor> manual_computation(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                                       const std::vector<DimAxes>& out, const std::vector<std::string>& manual,
                                       const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& body);

/// How many devices these mesh axes have together.
int64_t devices_along(const GraphOptions& options, const std::vector<std::string>& axes);

/// Collectives, inside manual_computation only: over all of `axes` at once, or over one mesh axis.
Tensor all_reduce_sum(Tensor x, const std::vector<std::string>& axes);
Tensor all_gather(Tensor x, const std::string& axis, int64_t dim);
Tensor reduce_scatter(Tensor x, const std::string& axis, int64_t dim);
/// Device i sends to (i + shift) mod n along the axis.
Tensor collective_permute(Tensor x, const std::string& axis, int64_t shift);
Tensor all_to_all(Tensor x, const std::string& axis, int64_t split_dim, int64_t concat_dim);
Tensor axis_index(Graph& g, const std::string& axis);  // s32 scalar

}  // namespace md
