// Mesh axes along which all devices of a program compute the same.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Mesh axes of size > 1 that shard no parameter, no state, and no value with a sharding constraint or per-device code,
/// in mesh order. The sharding of batches counts only in graphs without constraints, because the first constraint
/// reshards them.
std::vector<std::string> unused_mesh_axes(const Graph& graph);

/// Logs a warning for each of them; `name` is the program's.
void warn_of_unused_mesh_axes(const Graph& graph, const std::string& name);

}  // namespace md
