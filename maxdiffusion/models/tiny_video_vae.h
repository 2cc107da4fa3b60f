// TAEHV: latents, as the denoiser has them, to videos and back, by convolutions of frames, each of which also reads the
// frame before. Source: github.com/madebyollin/taehv, whose names the weights have: TAEW2.1 is of Wan 2.1's and
// Qwen-Image's latents, TAEW2.2 of Wan 2.2 5B's.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <vector>

#include "maxdiffusion/models/autoencoder.h"

namespace md {

struct TinyVideoVaeConfig {
  int64_t latent_channels = 16;
  int64_t patch_size = 1;  // sides of the squares of pixels that become channels first
  int64_t encoder_width = 64;
  std::vector<int64_t> decoder_widths = {256, 128, 64, 64};  // of the levels, and behind the last one
  std::vector<bool> encoder_time_downscale = {true, true, false}, decoder_time_upscale = {false, true, true};
  bool images = false;  // media are single frames, without a frame axis

  /// Pixels per latent cell along a side.
  int64_t downscale() const { return patch_size << encoder_time_downscale.size(); }
  /// Frames of one latent frame after the first.
  int64_t frame_scale() const;

  static TinyVideoVaeConfig from_json(const nlohmann::json& config);
};

/// pixels: [B, 1 + n·frame_scale(), H, W, 3] in [−1, 1] → [B, 1 + n, h, w, latent_channels]. The last frame is repeated
/// up to a multiple of frame_scale(): a latent frame is computed from the frames that follow.
Tensor tiny_video_vae_encode(const Scope& s, const TinyVideoVaeConfig& config, Tensor pixels);
/// latents: [B, 1 + n, h, w, latent_channels] → [B, 1 + n·frame_scale(), H, W, 3] in [−1, 1]. With a state: one chunk
/// of a video, as in Autoencoder::decode.
Tensor tiny_video_vae_decode(const Scope& s, const TinyVideoVaeConfig& config, Tensor latents,
                             MediaState* state = nullptr);
/// For the registry (registry.h).
void trace_tiny_video_vae(const Scope& s, const TinyVideoVaeConfig& config);
std::shared_ptr<Autoencoder> tiny_video_autoencoder(const TinyVideoVaeConfig& config);

}  // namespace md
