// Colours of latents without a decoder: one linear projection of each cell's channels, for previews.
#pragma once

#include <array>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/models/autoencoder.h"

namespace md {

/// Red, green and blue in [−1, 1] are bias + Σ channel · factor, of latents as the denoiser has them.
struct LatentColours {
  std::array<double, 3> bias;
  std::vector<std::array<double, 3>> factors;  // one row per channel

  /// Latents f32 [..., C] → f32 [..., 3].
  HostArray of(const HostArray& latents) const;
};
/// The colours of this autoencoder's latents, which its number of channels and their scale identify. For others false
/// colours, the first three channels: forms can be seen.
LatentColours latent_colours(const Autoencoder& autoencoder);
/// Whether they are not false.
bool has_latent_colours(const Autoencoder& autoencoder);

}  // namespace md
