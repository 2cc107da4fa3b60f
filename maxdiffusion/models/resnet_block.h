// Parts of both UNet2DConditionModel and AutoencoderKL: residual blocks, down- and upsampling. Names are diffusers'.
#pragma once

#include <string>

#include "maxdiffusion/nn/layers.h"

namespace md {

struct ResnetOptions {
  int64_t out = 0, groups = 32;
  double eps = 1e-5;
  std::string act = "silu";
  double scale_factor = 1;  // the sum is divided by it
  bool annotated = true;    // logical axes; false: everything replicated
};
/// norm1, act, conv1, + time_emb_proj(temb), norm2, act, conv2, + x (through conv_shortcut when the widths differ).
///   x: [B, H, W, C]   temb: [B, T] after its activation; absent in the autoencoder → [B, H, W, out]
Tensor resnet_block(const Scope& s, Tensor x, Tensor temb, const ResnetOptions& o);

/// 3×3 conv of stride 2 under `downsamplers.0.conv`. padding 1: both sides; 0: one zero row and column after.
Tensor downsample(const Scope& block, Tensor x, int64_t padding, bool annotated);
/// Nearest neighbour to [height, width], then a 3×3 conv, under `upsamplers.0.conv`. The target is twice the size of
/// x or one less, as a stride-2 convolution leaves it for odd sizes. Throws invalid_graph otherwise.
Tensor upsample(const Scope& block, Tensor x, int64_t height, int64_t width, bool annotated);

/// Convolution, with logical axes of weight and result if `annotated`.
Tensor annotated_conv(const Scope& s, Tensor x, nn::Conv2dOptions o, bool annotated);

}  // namespace md
