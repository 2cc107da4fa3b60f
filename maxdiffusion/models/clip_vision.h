// CLIP image encoders: CLIPVisionModel and CLIPVisionModelWithProjection. Source: transformers, modeling_clip.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct ClipVisionConfig {
  int64_t hidden_size = 768, intermediate_size = 3072, num_hidden_layers = 12, num_attention_heads = 12,
          num_channels = 3, image_size = 224, patch_size = 32, projection_dim = 512;
  std::string hidden_act = "quick_gelu";
  double layer_norm_eps = 1e-5;
  bool with_projection = false;  // architectures: CLIPVisionModelWithProjection

  /// Number of tokens: the class token and one for each patch.
  int64_t tokens() const { return 1 + (image_size / patch_size) * (image_size / patch_size); }

  static ClipVisionConfig from_json(const nlohmann::json& config);
};

struct ClipVisionOutput {
  /// Normed embeddings, then each layer's output without a norm after it: n + 1 of [B, tokens, hidden_size].
  std::vector<Tensor> hidden_states;
  Tensor pooled;        // [B, hidden_size]: the class token of the last layer, normed
  Tensor image_embeds;  // [B, projection_dim], with_projection only
};
/// pixels: [B, image_size, image_size, num_channels], normalized by the model's image processor.
ClipVisionOutput clip_vision(const Scope& s, const ClipVisionConfig& config, Tensor pixels);
/// Creates every parameter (registry.h).
void trace_clip_vision(const Scope& s, const ClipVisionConfig& config);

}  // namespace md
