// Operations that move elements without arithmetic. Axes may be negative. Source: StableHLO specification.
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md {

Tensor reshape(Tensor x, Dims dims);                          // one entry may be -1
bool is_reshape(Tensor x);                                    // whether reshape() created x
Tensor flatten(Tensor x, int64_t from = 0, int64_t to = -1);  // axes from…to (inclusive) become one
Tensor transpose(Tensor x, Axes permutation);
/// NumPy broadcast to `dims`: aligns trailing axes. No node when the shape is already right.
Tensor broadcast_to(Tensor x, Dims dims);
/// StableHLO broadcast_in_dim: axis i of x becomes axis dims[i] of the result.
Tensor broadcast_in_dim(Tensor x, Dims to, Axes dims);
Tensor expand_dims(Tensor x, int64_t axis);
Tensor squeeze(Tensor x, int64_t axis);
Tensor slice(Tensor x, Dims start, Dims limit, Dims stride = {});
/// x[..., start:limit, ...] along one axis; negative limits count from the end, limit = INT64_MAX means all.
Tensor slice_axis(Tensor x, int64_t axis, int64_t start, int64_t limit);
std::vector<Tensor> split(Tensor x, int64_t parts, int64_t axis);
Tensor concatenate(const std::vector<Tensor>& xs, int64_t axis);
Tensor stack(const std::vector<Tensor>& xs, int64_t axis);
/// Negative padding crops. `interior` inserts between elements.
Tensor pad(Tensor x, double value, Dims low, Dims high, Dims interior = {});
/// Zeros at the end of an axis, up to `length`. No node when the length is already right.
Tensor pad_end(Tensor x, int64_t axis, int64_t length);
Tensor reverse(Tensor x, Axes axes);
/// Start indices are scalar integer tensors, clamped as in StableHLO.
Tensor dynamic_slice(Tensor x, const std::vector<Tensor>& start, Dims sizes);
Tensor dynamic_update_slice(Tensor x, Tensor update, const std::vector<Tensor>& start);
/// x[i, ...] for a scalar integer i: drops axis 0.
Tensor dynamic_index(Tensor x, Tensor i);

}  // namespace md
