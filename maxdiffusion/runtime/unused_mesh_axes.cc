#include "maxdiffusion/runtime/unused_mesh_axes.h"

#include <algorithm>
#include <set>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/mesh/logical_axes.h"

namespace md {
namespace {

using Names = std::set<std::string>;

void add(const DimAxes& sharding, Names& to) {
  for (const auto& axes : sharding) to.insert(axes.begin(), axes.end());
}

/// Adds the mesh axes used by the live nodes of a graph and its loops. Returns whether any node uses one.
bool add_nodes(const Graph& graph, const std::vector<Tensor>& results, Names& to) {
  bool any = false;
  for (const Node* n : live_nodes(graph, results)) {
    if (n->op->shardings) {
      any = true;
      for (const DimAxes& sharding : n->op->shardings(*n)) add(sharding, to);
    }
    for (const auto& body : n->bodies) any |= add_nodes(*body, body->results, to);
  }
  return any;
}

}  // namespace

std::vector<std::string> unused_mesh_axes(const Graph& graph) {
  Names used;
  std::vector<Tensor> results;
  for (const GraphOutput& out : graph.outputs()) results.push_back(out.value);
  const bool constrained = add_nodes(graph, results, used);
  for (const GraphInput& in : graph.inputs()) {
    const bool batch = std::ranges::count(in.axes, axis::kData) > 0;
    if (!batch || !constrained) add(in.sharding, used);
  }
  std::vector<std::string> idle;
  for (const auto& [name, size] : graph.options().mesh_axes)
    if (size > 1 && !used.contains(name)) idle.push_back(name);
  return idle;
}

void warn_of_unused_mesh_axes(const Graph& graph, const std::string& name) {
  for (const std::string& axis : unused_mesh_axes(graph))
    log_warning(
        "{}: the mesh axis '{}' splits no weight and no activation, so that its devices repeat each other's work; give "
        "it a size of 1, or name it in logical_axis_rules for something that divides",
        name, axis);
}

}  // namespace md
