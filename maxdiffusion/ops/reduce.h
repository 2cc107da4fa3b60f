// Reductions and functions composed of them. Axes may be negative; empty `axes` means all. bf16/f16 inputs accumulate
// in f32; the result has the input's dtype.
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md {

Tensor sum(Tensor x, Axes axes = {}, bool keep = false);
Tensor mean(Tensor x, Axes axes = {}, bool keep = false);
Tensor max(Tensor x, Axes axes = {}, bool keep = false);  // gradient shared among ties
Tensor min(Tensor x, Axes axes = {}, bool keep = false);
Tensor all(Tensor x, Axes axes = {}, bool keep = false);  // pred
Tensor any(Tensor x, Axes axes = {}, bool keep = false);
/// Index (s32) of the largest element along `axis`, first on ties.
Tensor argmax(Tensor x, int64_t axis);
Tensor cumsum(Tensor x, int64_t axis);
/// exp(x − max) / sum along `axis`, computed in f32, returned in x's dtype.
Tensor softmax(Tensor x, int64_t axis = -1);
Tensor logsumexp(Tensor x, int64_t axis, bool keep = false);
/// Sorts `keys` ascending along `axis` (stable) and permutes the values in the same way.
std::vector<Tensor> sort(Tensor keys, const std::vector<Tensor>& values, int64_t axis, bool descending = false);
/// Sum in f32 of |x|² over all tensors: the square of the global norm.
Tensor sum_of_squares(const std::vector<Tensor>& xs);

}  // namespace md
