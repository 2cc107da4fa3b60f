// Packing of 2×2 latents into the channels of one token: the four values of the first channel, then those of the next.
// Sources: FLUX.1 and FLUX.2, Black Forest Labs.
#pragma once

#include "maxdiffusion/graph/tensor.h"

namespace md {

inline constexpr int64_t kLatentPatch = 2;

/// [B, h, w, C] → [B, h/2, w/2, 4C].
Tensor to_latent_patches(Tensor x);
/// The inverse: [B, h/2, w/2, 4C] → [B, h, w, C].
Tensor from_latent_patches(Tensor x);

}  // namespace md
