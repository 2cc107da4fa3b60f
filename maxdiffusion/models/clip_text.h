// CLIP text encoders: CLIPTextModel and CLIPTextModelWithProjection. Source: transformers, modeling_clip.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct ClipTextConfig {
  int64_t vocab_size = 49408, hidden_size = 512, intermediate_size = 2048, num_hidden_layers = 12,
          num_attention_heads = 8, max_position_embeddings = 77, projection_dim = 512, eos_token_id = 49407;
  std::string hidden_act = "quick_gelu";
  double layer_norm_eps = 1e-5;
  bool with_projection = false;  // architectures: CLIPTextModelWithProjection
  int64_t added_tokens = 0;      // learned embeddings, whose ids follow those of the vocabulary; not in config.json

  static ClipTextConfig from_json(const nlohmann::json& config);
};

struct ClipTextOutput {
  std::vector<Tensor> hidden_states;  // embedding output, then each layer's: n + 1 of [B, L, width]
  Tensor last_hidden_state;           // after final_layer_norm
  Tensor skipped;                     // layer n − skip after final_layer_norm; absent if skip is 0
  Tensor pooled;                      // [B, width] at the position of the end token
  Tensor text_embeds;                 // [B, projection_dim], with_projection only
};
/// ids: [B, L] s32. `skip`: number of last layers that `skipped` omits, in [0, n] ("clip skip"). Throws invalid_config
/// for other values.
ClipTextOutput clip_text(const Scope& s, const ClipTextConfig& config, Tensor ids, int64_t skip = 0);
/// Creates every parameter (registry.h).
void trace_clip_text(const Scope& s, const ClipTextConfig& config);

}  // namespace md
