// Decoder-only transformers as text encoders: hidden states of chosen layers. What Qwen3 and the language part of
// Qwen2.5-VL differ in are values of one config. Sources: transformers, modeling_qwen3 and modeling_qwen2_5_vl.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

/// Ends of the names of the layers that LoRA usually changes.
inline const std::vector<std::string> kDecoderLoraTargets = {"q_proj", "k_proj", "v_proj", "o_proj"};

struct DecoderConfig {
  int64_t vocab_size = 151936, hidden_size = 4096, intermediate_size = 22016, num_hidden_layers = 32,
          num_attention_heads = 32, num_key_value_heads = 32, head_dim = 128;
  double rms_norm_eps = 1e-6, rope_theta = 10000;
  bool qkv_bias = false, out_bias = false;  // of the projections of attention
  bool qk_norm = true;                      // queries and keys of each head are normalized
  std::string hidden_act = "silu";
};
/// Qwen3Model, and Qwen3ForCausalLM, whose last projection is not read.
struct Qwen3Config : DecoderConfig {
  /// Throws invalid_config for sliding windows, scaled positions and heads that do not divide into groups.
  static Qwen3Config from_json(const nlohmann::json& config);
};
/// Qwen2_5_VLForConditionalGeneration without its image encoder. The sections of its rotary positions are one for text.
struct Qwen25VlConfig : DecoderConfig {
  /// `text_config`, or since some files have no such member all of it. Throws as Qwen3Config::from_json does.
  static Qwen25VlConfig from_json(const nlohmann::json& config);
};

/// A message of the user in Qwen3's chat template, and the beginning of the answer: after thoughts, or without any.
std::string qwen3_chat(const std::string& prompt, bool thinks);

/// ids: [B, L] s32, padding only behind a text. `layers`: 0 for the embeddings, i for what the i-th layer gives, and
/// num_hidden_layers for that of the last layer after the final norm, as transformers numbers hidden_states. The
/// result has them in this order: [B, L, hidden_size] each. Tokens see those before them, so that padding changes
/// nothing before it. `lengths`: s32 [B], the tokens of each text, at least 1: padding sees them and no padding, as in
/// transformers with a mask; absent: padding sees what is before it, too.
std::vector<Tensor> decoder_hidden_states(const Scope& s, const DecoderConfig& config, Tensor ids,
                                          const std::vector<int64_t>& layers, Tensor lengths = {});
/// Requests every parameter (registry.h).
void trace_decoder(const Scope& s, const DecoderConfig& config);
/// What files of whole language models, with images or without, call the parameters.
WeightNameMap causal_decoder_names(const DecoderConfig& config);

}  // namespace md
