// The transformer of CLIP's text and vision models. Source: transformers, modeling_clip (CLIPEncoder).
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct ClipEncoderOptions {
  int64_t layers = 0, heads = 0,
          intermediate = 0;  // blocks; heads of attention; hidden width of the feed-forward network
  std::string activation = {};
  double eps = 0;       // of the layer norms
  bool causal = false;  // causal mask
};
/// x: [B, L, width] → x and the output of each layer, n + 1 of [B, L, width], without a norm after the last.
/// Parameters: `s`/layers.N.(layer_norm1, self_attn.(q_proj, k_proj, v_proj, out_proj), layer_norm2, mlp.(fc1, fc2)).
std::vector<Tensor> clip_encoder(const Scope& s, Tensor x, const ClipEncoderOptions& o);

}  // namespace md
