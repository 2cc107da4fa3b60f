// AutoencoderKLFlux2: AutoencoderKL with latents that are packed 2×2 into channels and normalized with the statistics
// of a batch norm, which are weights. "Latents" below are the normalized ones, the denoiser's input. Source: diffusers
// 0.42, AutoencoderKLFlux2.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "maxdiffusion/models/autoencoder.h"
#include "maxdiffusion/models/vae.h"

namespace md {

struct Flux2VaeConfig {
  VaeConfig encoder, decoder;  // equal except for the widths of their levels
  double batch_norm_eps = 1e-4;

  /// Channels of latents.
  int64_t channels() const;
  /// Pixels per latent along a side.
  int64_t downscale() const;
  /// Throws invalid_config as UNetConfig::from_json does.
  static Flux2VaeConfig from_json(const nlohmann::json& config);
};

/// Statistics of latents before normalization, f32 [1, 1, 1, channels] each. They are measured, not trained.
struct LatentStatistics {
  Tensor mean, variance;
};
/// The parameters bn.running_mean and bn.running_var, the latter plus batch_norm_eps.
LatentStatistics flux2_vae_statistics(const Scope& s, const Flux2VaeConfig& config);

/// pixels: [B, H, W, 3] in [−1, 1] → [B, H/d, W/d, channels], normalized.
Posterior flux2_vae_encode(const Scope& s, const Flux2VaeConfig& config, const LatentStatistics& statistics,
                           Tensor pixels);
/// Normalized latents → the decoder's input, which diffusers' pipelines return for output_type=latent: [B, 2H/d, 2W/d,
/// channels/4], f32.
Tensor flux2_vae_unpatched(const LatentStatistics& statistics, Tensor latents);
/// Normalized latents → [B, H, W, 3].
Tensor flux2_vae_decode(const Scope& s, const Flux2VaeConfig& config, const LatentStatistics& statistics,
                        Tensor latents);

/// For the registry (registry.h).
void trace_flux2_vae(const Scope& s, const Flux2VaeConfig& config);
std::shared_ptr<Autoencoder> flux2_autoencoder(const Flux2VaeConfig& config);

}  // namespace md
