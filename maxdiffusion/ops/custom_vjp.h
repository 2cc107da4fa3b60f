// Functions with a custom gradient: for kernels, or to save memory, communication or rounding error.
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
