// Sharding constraints, per-device code and collectives. Prints Shardy (sdy) text.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Sharding constraint by logical names, resolved by the rules the graph was opened with; "" replicates an axis. The
/// identity on one device. Throws invalid_graph on a name without a rule. Gradient: this constraint on the cotangent.
Tensor shard(Tensor x, const LogicalAxes& names);
/// Sharding constraint by mesh axes, on the value and on its cotangent.
Tensor shard_axes(Tensor x, DimAxes axes);
/// Sharding constraint by mesh axes: `axes` on the value, `cotangent` on its cotangent.
Tensor shard_axes(Tensor x, DimAxes axes, DimAxes cotangent);
/// Mesh axes of a weight with these logical axes during computation: only `tensor` of those that shard its storage.
DimAxes axes_in_use(Tensor weight, const LogicalAxes& names);
/// Gathers a stored weight for computation: replicated along every mesh axis but `tensor` (as ZeRO-3); its gradient is
/// sharded as the weight is stored. Explicit, because XLA's partitioner chooses poor plans if batch and weight are
/// sharded over the same axis, and a wrong one on three axes (its dots permute the batch).
Tensor gather_weight(Tensor weight, const LogicalAxes& names);
/// Shards a weight's gradient as the weight with these logical axes is stored.
Tensor shard_as_stored(Tensor gradient, const LogicalAxes& names);

/// Code per device over `manual` mesh axes (sdy.manual_computation): the body has local shapes and may use the
/// collectives below. `in`/`out`: mesh axes per dim of each argument and result.
std::vector<Tensor> manual_computation(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                                       const std::vector<DimAxes>& out, const std::vector<std::string>& manual,
                                       const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& body);

/// Number of devices along these mesh axes.
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
