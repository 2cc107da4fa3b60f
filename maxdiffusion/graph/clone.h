// Copies of nodes, for recomputation and gradients of loops.
#pragma once

#include <functional>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Maps a value that the copied node reads to its value in the target graph.
using ValueMap = std::function<Tensor(Tensor)>;

/// A copy of `node` in `into` with mapped inputs, the same path and name. Copies bodies, with mapped captures; nodes
/// inside them keep their rematerialisation regions.
Node* clone_node(const Node& node, Graph& into, const ValueMap& value);
/// A copy of a loop body, as a body of a loop in `parent`.
std::shared_ptr<Graph> clone_body(const Graph& body, Graph& parent, const ValueMap& outer_value);
/// Copies the nodes of `body` that its results need into `into`; arguments and captures are mapped by `value`.
/// Returns the results.
std::vector<Tensor> clone_results(const Graph& body, Graph& into, const ValueMap& value);

}  // namespace md
