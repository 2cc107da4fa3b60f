// Packing of n×n cells into the channels of one: the values of the first channel, row by row, then those of the next;
// as torch's pixel_unshuffle. Of latents the cells are 2×2. Sources: FLUX.1 and FLUX.2, Black Forest Labs.
#pragma once

#include "maxdiffusion/graph/tensor.h"

namespace md {

inline constexpr int64_t kLatentPatch = 2;

/// [B, h, w, C] → [B, h/n, w/n, n²·C].
Tensor to_latent_patches(Tensor x, int64_t n = kLatentPatch);
/// The inverse: [B, h/n, w/n, n²·C] → [B, h, w, C].
Tensor from_latent_patches(Tensor x, int64_t n = kLatentPatch);

}  // namespace md
