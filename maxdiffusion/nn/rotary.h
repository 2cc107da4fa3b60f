// Rotary positions: each pair of a head's features is turned by an angle that grows with the token's place, so that
// products of queries with keys see distances. Source: Su et al. 2021 (RoFormer).
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md::nn {

/// Of S tokens: f32 [1, S, 1, d/2], or [B, S, 1, d/2] where samples differ.
struct Rotary {
  Tensor cosines, sines;
};

/// Of tokens on a grid, the last axis of which runs fastest. Of the features of a head the first sizes[0] turn with the
/// place along grid axis 0, and so on; those of axis i by angles place · theta^(−2k/sizes[i]), computed in double.
/// Sizes are even. Places of axis i count from offsets[i]; empty: from 0.
Rotary grid_rotary(Graph& g, const Dims& grid, const Dims& sizes, double theta = 10000, const Dims& offsets = {});
/// The same behind `tokens` more, which are not turned.
Rotary with_unrotated_prefix(int64_t tokens, const Rotary& r);
/// The same for tokens whose places are data: s32 [B, S, axes], along axis i from 0 to limits[i] − 1.
Rotary rotary_at(Tensor places, const Dims& limits, const Dims& sizes, double theta = 10000);

/// Which features of a head are a pair: 2k and 2k + 1, or k and k + d/2.
enum class RotaryPairs { neighbours, halves };
/// Turns x [B, S, N, d]. The result holds all first members of the pairs, then all second ones: products of queries
/// with keys do not see an order that both have. Computed in f32.
Tensor rotated(Tensor x, const Rotary& r, RotaryPairs pairs = RotaryPairs::neighbours);

}  // namespace md::nn
