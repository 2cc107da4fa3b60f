// 8-bit moments with one scale for each kScaleBlock elements (base/dynamic_map.h), as graph operations.
#pragma once

#include "maxdiffusion/base/dynamic_map.h"
#include "maxdiffusion/graph/graph.h"

namespace md {

/// `codes`: u8, with the dims of the array: the nearest codes of the map. `scales`: f32 [layers, blocks], the largest
/// magnitudes.
struct EightBits {
  Tensor codes, scales;
};
EightBits in_eight_bits(Tensor x, int64_t layers, bool with_sign);
/// Dequantizes to f32.
Tensor from_eight_bits(const EightBits& x, int64_t layers, bool with_sign);

}  // namespace md
