// AutoencoderTiny: latents, as the denoiser has them, to images and back, by a small stack of convolutions. Sources:
// diffusers, AutoencoderTiny; github.com/madebyollin/taesd, also for TAEF2, which diffusers does not have: blocks next
// to the latents have a branch with a normalization.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/models/autoencoder.h"

namespace md {

struct TinyVaeConfig {
  int64_t in_channels = 3, out_channels = 3, latent_channels = 4;
  std::vector<int64_t> encoder_widths = {64, 64, 64, 64}, decoder_widths = {64, 64, 64, 64};
  std::vector<int64_t> encoder_blocks = {1, 3, 3, 3}, decoder_blocks = {3, 3, 3, 1};  // at each level
  std::string act_fn = "relu";
  double scaling_factor = 1, shift_factor = 0;
  bool use_midblock_gn = false;  // as TAEF2
  int64_t patch_size = 1;        // sides of the squares of latents that are one cell of the denoiser's
  /// Pixels per latent along a side.
  int64_t downscale() const { return int64_t{1} << (decoder_widths.size() - 1); }

  static TinyVaeConfig from_json(const nlohmann::json& config);
};

/// pixels: [B, H, W, in_channels] in [−1, 1] → [B, h, w, latent_channels].
Tensor tiny_vae_encode(const Scope& s, const TinyVaeConfig& config, Tensor pixels);
/// latents: [B, h, w, latent_channels] → [B, H, W, out_channels] in [−1, 1] up to error.
Tensor tiny_vae_decode(const Scope& s, const TinyVaeConfig& config, Tensor latents);
/// For the registry (registry.h).
void trace_tiny_vae(const Scope& s, const TinyVaeConfig& config);
std::shared_ptr<Autoencoder> tiny_autoencoder(const TinyVaeConfig& config);

}  // namespace md
