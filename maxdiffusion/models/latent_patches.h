// Two rows and two columns of latents as the channels of one token: of the first channel all four, then of the next.
// Sources: FLUX.1 and FLUX.2, Black Forest Labs.
#pragma once

#include "maxdiffusion/graph/tensor.h"

namespace md {

inline constexpr int64_t kLatentPatch = 2;

/// [B, h, w, C] → [B, h/2, w/2, 4C].
Tensor to_latent_patches(Tensor x);
/// Undoes it.
Tensor from_latent_patches(Tensor x);

}  // namespace md
