// Mesh axes along which every device of a program does the same work.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Mesh axes of more than one device that split no parameter, no state and nothing that the graph lays on the mesh by
/// itself (constraints, code per device), in mesh order. That batches are stored in shards does not count, because the
/// first constraint lays them anew; in a graph without constraints it does, because their split then carries on.
std::vector<std::string> unused_mesh_axes(const Graph& graph);

/// Logs a warning for each of them; `name` is the program's.
void warn_of_unused_mesh_axes(const Graph& graph, const std::string& name);

}  // namespace md
