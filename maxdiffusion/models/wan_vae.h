// AutoencoderKLWan: videos to latents and back, causal in time, so that videos of any length are processed in chunks.
// The first latent frame is the first frame; each further one covers frame_scale() frames. Sources: Wan team 2025,
// section 4.1; diffusers, AutoencoderKLWan, of versions 2.1 (four levels of blocks in one list) and 2.2 (is_residual:
// every level has a shortcut that averages or repeats; pixels are patchified); AutoencoderKLQwenImage, which is 2.1 for
// images.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <vector>

#include "maxdiffusion/models/autoencoder.h"

namespace md {

struct WanVaeConfig {
  int64_t base_dim = 96, decoder_base_dim = 96, z_dim = 16;  // decoder_base_dim: default: that of the encoder
  std::vector<int64_t> dim_mult = {1, 2, 4, 4};
  int64_t num_res_blocks = 2;
  std::vector<double> attn_scales;  // levels of the encoder (1, 1/2, …) with attention after their blocks
  std::vector<bool> temperal_downsample = {false, true, true};
  std::vector<double> latents_mean, latents_std;  // per channel; default: those of 2.1
  bool is_residual = false, clip_output = true;
  int64_t in_channels = 3, out_channels = 3;  // after patching
  int64_t patch_size = 1;                     // default 1
  bool images = false;                        // media are single frames, without a frame axis
  // Values of the file. The graph follows from the levels: downscale() and frame_scale().
  int64_t scale_factor_temporal = 4, scale_factor_spatial = 8;

  /// Pixels per latent cell along a side.
  int64_t downscale() const { return patch_size << (dim_mult.size() - 1); }
  /// Frames of one latent frame after the first.
  int64_t frame_scale() const;

  static WanVaeConfig from_json(const nlohmann::json& config);
};
struct QwenImageVaeConfig : WanVaeConfig {
  static QwenImageVaeConfig from_json(const nlohmann::json& config);
};

/// pixels: [B, F, H, W, 3] in [−1, 1], F = 1 + n·frame_scale() → latents [B, 1 + n, h, w, z_dim], unscaled. With a
/// state: one chunk of a video, as in Autoencoder::encode.
Posterior wan_vae_encode(const Scope& s, const WanVaeConfig& config, Tensor pixels, MediaState* state = nullptr);
/// latents: [B, 1 + n, h, w, z_dim], unscaled → [B, 1 + n·frame_scale(), H, W, 3], f32. Chunks as in wan_vae_encode.
Tensor wan_vae_decode(const Scope& s, const WanVaeConfig& config, Tensor latents, MediaState* state = nullptr);
/// For the registry (registry.h): creates every parameter; the autoencoder, with a scale per channel.
void trace_wan_vae(const Scope& s, const WanVaeConfig& config);
std::shared_ptr<Autoencoder> wan_autoencoder(const WanVaeConfig& config);

}  // namespace md
