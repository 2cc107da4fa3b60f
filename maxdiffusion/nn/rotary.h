// Rotary positions: each pair of neighbouring features of a head is turned by an angle that grows with the token's
// place, so that products of queries with keys see distances. Source: Su et al. 2021 (RoFormer).
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md::nn {

/// Of S tokens: f32 [1, S, 1, d/2].
struct Rotary {
  Tensor cosines, sines;
};

/// Of tokens on a grid, the last axis of which runs fastest. Of the features of a head the first sizes[0] turn with the
/// place along grid axis 0, and so on; those of axis i by angles place · 10000^(−2k/sizes[i]). Sizes are even.
Rotary grid_rotary(Graph& g, const Dims& grid, const Dims& sizes);
/// The same behind `tokens` more, which are not turned.
Rotary with_unrotated_prefix(int64_t tokens, const Rotary& r);

/// Turns x [B, S, N, d]. The result holds all first members of the pairs, then all second ones: products of queries
/// with keys do not see an order that both have. Computed in f32.
Tensor rotated(Tensor x, const Rotary& r);

}  // namespace md::nn
