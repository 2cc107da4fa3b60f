// ControlNetModel: a copy of the UNet's way down that sees a control image; what it computes is added to the UNet's
// skips. Source: Zhang et al. 2023 (ControlNet); diffusers, ControlNetModel, whose names and config.json these are.
#pragma once

#include "maxdiffusion/models/unet2d.h"

namespace md {

struct ControlNetConfig {
  UNetConfig unet;  // its way up is not used
  int64_t conditioning_channels = 3;
  std::vector<int64_t> conditioning_embedding_out_channels = {16, 32, 96, 256};
  bool bgr = false;                     // the image's channels are reversed first
  bool global_pool_conditions = false;  // residuals are averaged over height and width

  /// Pixels of the image on the side of one latent cell.
  int64_t downscale() const { return int64_t{1} << (conditioning_embedding_out_channels.size() - 1); }
  /// Throws invalid_config as UNetConfig::from_json does.
  static ControlNetConfig from_json(const nlohmann::json& config);
};

struct ControlResiduals {
  std::vector<Tensor> down;  // for UNetInputs::down_residuals
  Tensor mid;                // for UNetInputs::mid_residual
};
/// `image`: [B, H·downscale, W·downscale, conditioning_channels] in [0, 1], where `in.sample` is [B, H, W, C].
ControlResiduals controlnet(const Scope& s, const ControlNetConfig& config, const UNetInputs& in, Tensor image);
/// Asks for every parameter (registry.h).
void trace_controlnet(const Scope& s, const ControlNetConfig& config);

}  // namespace md
