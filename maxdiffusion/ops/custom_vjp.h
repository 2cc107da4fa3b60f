// A composition of operations with a gradient of its own: for kernels, and where the gradient that its parts would give
// costs more memory or communication, or rounds worse.
#pragma once

#include <functional>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// f(xs) whose gradient is `backward(xs, ys, dys)`, one cotangent per x; an absent cotangent is zero.
std::vector<Tensor> custom_vjp(const std::vector<Tensor>& xs, const GraphFn& forward,
                               const std::function<Grads(const std::vector<Tensor>& xs, const std::vector<Tensor>& ys,
                                                         const Grads& dys)>& backward);

}  // namespace md
