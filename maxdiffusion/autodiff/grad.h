// Reverse-mode differentiation of a graph: one sweep from the outputs, which adds nodes to the same graph.
#pragma once

#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// d loss / d x for every x. `loss` is a floating scalar. A tensor that loss does not depend on gets an empty Tensor.
/// A value used twice accumulates. Throws invalid_graph, naming op and path, for an op without a gradient rule, and
/// with both shapes when a rule returns a cotangent of the wrong shape.
std::vector<Tensor> grad(Tensor loss, const std::vector<Tensor>& xs);
/// Cotangents of xs given those of ys (empty = zero).
std::vector<Tensor> vjp(const std::vector<Tensor>& ys, const std::vector<Tensor>& dys, const std::vector<Tensor>& xs);

}  // namespace md
