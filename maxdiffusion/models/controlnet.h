// ControlNetModel: a copy of the UNet's encoder with a control image as input; its outputs are added to the UNet's skip
// connections. Source: Zhang et al. 2023 (ControlNet); diffusers, ControlNetModel, whose names and config.json it uses.
#pragma once

#include "maxdiffusion/models/unet2d.h"

namespace md {

struct ControlNetConfig {
  UNetConfig unet;  // its decoder is unused
  int64_t conditioning_channels = 3;
  std::vector<int64_t> conditioning_embedding_out_channels = {16, 32, 96, 256};
  bool bgr = false;                     // the channel order of the image is reversed
  bool global_pool_conditions = false;  // residuals are averaged over height and width

  /// Pixels of the image for each latent cell along a side.
  int64_t downscale() const { return int64_t{1} << (conditioning_embedding_out_channels.size() - 1); }
  /// Throws invalid_config as UNetConfig::from_json does.
  static ControlNetConfig from_json(const nlohmann::json& config);
};

struct ControlResiduals {
  std::vector<Tensor> down;  // for UNetInputs::down_residuals
  Tensor mid;                // for UNetInputs::mid_residual
};
/// `image`: [B, H·downscale, W·downscale, conditioning_channels] in [0, 1], for `in.sample` [B, H, W, C].
ControlResiduals controlnet(const Scope& s, const ControlNetConfig& config, const UNetInputs& in, Tensor image);
/// Creates every parameter (registry.h).
void trace_controlnet(const Scope& s, const ControlNetConfig& config);

}  // namespace md
