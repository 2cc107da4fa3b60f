// Transformer2DModel of the UNets: self attention, cross attention and a gated feed-forward over the pixels as tokens.
#pragma once

#include "maxdiffusion/nn/layers.h"

namespace md {

struct Transformer2DOptions {
  int64_t heads = 8, layers = 1, groups = 32;
  bool linear_projection = false;     // proj_in and proj_out over tokens, else 1×1 convolutions
  bool only_cross_attention = false;  // attn1 attends to the context too
  bool upcast_attention = false;
  Tensor context_rows = {};  // s32 [B]: rows of the context at this position and later are padding; absent: none are
  /// As MultiHeadOptions::also of the attention to the context at `path`.
  std::function<Tensor(const std::string& path, Tensor q)> image_attention = {};
};
/// x: [B, H, W, C]   context: [B, L, D] → [B, H, W, C].
Tensor transformer2d(const Scope& s, Tensor x, Tensor context, const Transformer2DOptions& o);

}  // namespace md
