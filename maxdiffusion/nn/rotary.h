// Rotary positions: each pair of a head's features is rotated by an angle proportional to the token's position, so that
// attention logits depend on distances. Source: Su et al. 2021 (RoFormer).
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md::nn {

/// For S tokens: f32 [1, S, 1, d/2], or [B, S, 1, d/2] if samples differ.
struct Rotary {
  Tensor cosines, sines;
};

/// For tokens on a grid (row-major). The first sizes[0] features of a head encode the position along grid axis 0, and
/// so on, with angles position · theta^(−2k/sizes[i]), computed in double. Sizes are even. Positions of axis i start at
/// offsets[i]; empty: at 0.
Rotary grid_rotary(Graph& g, const Dims& grid, const Dims& sizes, double theta = 10000, const Dims& offsets = {});
/// Prepends `tokens` positions with rotation zero.
Rotary with_unrotated_prefix(int64_t tokens, const Rotary& r);
/// For positions that are data: s32 [B, S, axes], along axis i from 0 to limits[i] − 1.
Rotary rotary_at(Tensor places, const Dims& limits, const Dims& sizes, double theta = 10000);

/// Features of a head that form a pair: 2k and 2k + 1, or k and k + d/2.
enum class RotaryPairs { neighbours, halves };
/// Rotates x [B, S, N, d]. Of neighbours, the result has all first elements of the pairs, then all second ones, but on
/// TPUs the order of x; attention logits do not depend on it. Computed in f32.
Tensor rotated(Tensor x, const Rotary& r, RotaryPairs pairs = RotaryPairs::neighbours);

}  // namespace md::nn
