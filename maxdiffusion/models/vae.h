// AutoencoderKL: images to latents and back. Source: diffusers, AutoencoderKL; Rombach et al. 2022, section 3.1.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/models/autoencoder.h"

namespace md {

struct VaeConfig {
  int64_t in_channels = 3, out_channels = 3, latent_channels = 4, layers_per_block = 1, norm_num_groups = 32;
  std::vector<int64_t> block_out_channels = {64};
  std::vector<std::string> down_block_types, up_block_types;
  std::string act_fn = "silu";
  double scaling_factor = 0.18215, shift_factor = 0;
  bool use_quant_conv = true, use_post_quant_conv = true, mid_block_add_attention = true, force_upcast = true;
  int64_t sample_size = 0;
  int64_t downscale() const { return int64_t{1} << (block_out_channels.size() - 1); }

  static VaeConfig from_json(const nlohmann::json& config);
};

/// pixels: [B, H, W, 3] in [−1, 1] → [B, h, w, latent_channels], unscaled; logvar is clipped to [−30, 20].
Posterior vae_encode(const Scope& s, const VaeConfig& config, Tensor pixels);
/// latents: [B, h, w, latent_channels], unscaled → [B, H, W, 3].
Tensor vae_decode(const Scope& s, const VaeConfig& config, Tensor latents);
/// For the registry (registry.h): creates every parameter; the autoencoder, whose measured scale has a shift if
/// config.json has one.
void trace_vae(const Scope& s, const VaeConfig& config);
std::shared_ptr<Autoencoder> kl_autoencoder(const VaeConfig& config);

}  // namespace md
