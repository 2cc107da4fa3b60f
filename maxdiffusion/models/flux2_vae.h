// AutoencoderKLFlux2: AutoencoderKL, whose latents are taken two rows and two columns at a time and normalized by
// statistics of a batch norm, which are weights. What is called latents here is normalized: the denoiser takes it as it
// is. Source: diffusers 0.42, AutoencoderKLFlux2.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "maxdiffusion/models/autoencoder.h"
#include "maxdiffusion/models/vae.h"

namespace md {

struct Flux2VaeConfig {
  VaeConfig encoder, decoder;  // which differ in the widths of their levels at most
  double batch_norm_eps = 1e-4;

  /// Channels of latents.
  int64_t channels() const;
  /// Pixels per latent along a side.
  int64_t downscale() const;
  /// Throws invalid_config as UNetConfig::from_json does.
  static Flux2VaeConfig from_json(const nlohmann::json& config);
};

/// Of latents before they are normalized, f32 [1, 1, 1, channels] each. They are measured, not learnt.
struct LatentStatistics {
  Tensor mean, variance;
};
/// The parameters bn.running_mean and bn.running_var, the second with batch_norm_eps.
LatentStatistics flux2_vae_statistics(const Scope& s, const Flux2VaeConfig& config);

/// pixels: [B, H, W, 3] in [−1, 1] → [B, H/d, W/d, channels], normalized.
Posterior flux2_vae_encode(const Scope& s, const Flux2VaeConfig& config, const LatentStatistics& of, Tensor pixels);
/// Normalized latents → what the decoder takes, and diffusers' pipelines return for output_type=latent: [B, 2H/d, 2W/d,
/// channels/4], f32.
Tensor flux2_vae_unpatched(const LatentStatistics& of, Tensor latents);
/// Normalized latents → [B, H, W, 3].
Tensor flux2_vae_decode(const Scope& s, const Flux2VaeConfig& config, const LatentStatistics& of, Tensor latents);

/// For the registry (registry.h).
void trace_flux2_vae(const Scope& s, const Flux2VaeConfig& config);
std::shared_ptr<Autoencoder> flux2_autoencoder(const Flux2VaeConfig& config);

}  // namespace md
