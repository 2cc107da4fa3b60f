// AutoencoderKLWan: videos to latents and back, causal in time, so that a video of any length goes through it in
// chunks. The first frame is a latent frame of its own; each further one stands for frame_scale() frames. Sources: Wan
// team 2025, section 4.1; diffusers, AutoencoderKLWan, of versions 2.1 (four levels of blocks in one list) and 2.2
// (is_residual: every level has a shortcut that averages or repeats, and pixels go in as patches).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <vector>

#include "maxdiffusion/models/autoencoder.h"

namespace md {

struct WanVaeConfig {
  int64_t base_dim = 96, decoder_base_dim = 96, z_dim = 16;  // decoder_base_dim: that of the encoder where absent
  std::vector<int64_t> dim_mult = {1, 2, 4, 4};
  int64_t num_res_blocks = 2;
  std::vector<double> attn_scales;  // of the encoder's levels, 1 for the first, 1/2 …: attention after their blocks
  std::vector<bool> temperal_downsample = {false, true, true};
  std::vector<double> latents_mean, latents_std;  // of each channel; the published 2.1's where absent
  bool is_residual = false, clip_output = true;
  int64_t in_channels = 3, out_channels = 3;  // after patching
  int64_t patch_size = 1;                     // 1 where absent
  // As the file says. What the graph does follows from the levels: downscale() and frame_scale().
  int64_t scale_factor_temporal = 4, scale_factor_spatial = 8;

  /// Pixels on the side of one latent cell.
  int64_t downscale() const { return patch_size << (dim_mult.size() - 1); }
  /// Frames of one latent frame after the first.
  int64_t frame_scale() const;

  static WanVaeConfig from_json(const nlohmann::json& config);
};

/// pixels: [B, F, H, W, 3] in [−1, 1], F = 1 + n·frame_scale() → latents [B, 1 + n, h, w, z_dim], unscaled.
/// With a state pixels are one chunk of a video, as Autoencoder::encode has it.
Posterior wan_vae_encode(const Scope& s, const WanVaeConfig& config, Tensor pixels, MediaState* state = nullptr);
/// latents: [B, 1 + n, h, w, z_dim], unscaled → [B, 1 + n·frame_scale(), H, W, 3], f32. Chunks as in wan_vae_encode.
Tensor wan_vae_decode(const Scope& s, const WanVaeConfig& config, Tensor latents, MediaState* state = nullptr);
/// For the registry (registry.h): what asks for every parameter; the autoencoder, whose scale is that of each channel.
void trace_wan_vae(const Scope& s, const WanVaeConfig& config);
std::shared_ptr<Autoencoder> wan_autoencoder(const WanVaeConfig& config);

}  // namespace md
