// Reverse-mode differentiation of a graph: one sweep from the outputs back, adding nodes to the same graph.
#pragma once

#include <functional>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// d loss / d x for every x. `loss` is a floating scalar. A tensor that loss does not depend on gets an empty Tensor.
/// A value used twice accumulates. Throws invalid_graph, naming op and path, for an op without a gradient rule, and
/// with both shapes when a rule returns a cotangent of the wrong shape.
std::vector<Tensor> grad(Tensor loss, const std::vector<Tensor>& xs);
/// Cotangents of xs given those of ys (empty = zero).
std::vector<Tensor> vjp(const std::vector<Tensor>& ys, const std::vector<Tensor>& dys, const std::vector<Tensor>& xs);

using GraphFn = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;
/// f(xs) whose gradient is `backward(xs, ys, dys)`, one cotangent per x. For kernels and numerically better rules.
std::vector<Tensor> custom_vjp(const std::vector<Tensor>& xs, const GraphFn& forward,
                               const std::function<Grads(const std::vector<Tensor>& xs, const std::vector<Tensor>& ys,
                                                         const Grads& dys)>& backward);

}  // namespace md
