// Qwen3, a decoder-only transformer, as a text encoder: hidden states of chosen layers. Source: transformers,
// modeling_qwen3.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

/// Ends of the names of the layers that LoRA usually changes.
inline const std::vector<std::string> kQwen3LoraTargets = {"q_proj", "k_proj", "v_proj", "o_proj"};

struct Qwen3Config {
  int64_t vocab_size = 151936, hidden_size = 4096, intermediate_size = 22016, num_hidden_layers = 32,
          num_attention_heads = 32, num_key_value_heads = 32, head_dim = 128;
  double rms_norm_eps = 1e-6, rope_theta = 10000;
  bool attention_bias = false;
  std::string hidden_act = "silu";

  /// Throws invalid_config for sliding windows, scaled positions and heads that do not divide into groups.
  static Qwen3Config from_json(const nlohmann::json& config);
};

/// ids: [B, L] s32, padding only behind a text. `layers`: 0 for the embeddings, i for what the i-th layer gives, and
/// num_hidden_layers for that of the last layer after the final norm, as transformers numbers hidden_states. The
/// result has them in this order: [B, L, hidden_size] each. Tokens see those before them, so that padding changes
/// nothing before it.
std::vector<Tensor> qwen3_hidden_states(const Scope& s, const Qwen3Config& config, Tensor ids,
                                        const std::vector<int64_t>& layers);
/// Asks for every parameter (registry.h).
void trace_qwen3(const Scope& s, const Qwen3Config& config);
/// What files of the whole language model (Qwen3ForCausalLM) call the parameters.
WeightNameMap qwen3_causal_names(const Qwen3Config& config);

}  // namespace md
