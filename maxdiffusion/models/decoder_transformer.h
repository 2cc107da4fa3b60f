// Decoder-only transformers as text encoders: hidden states of selected layers. One config covers the differences
// between Qwen3 and the language model of Qwen2.5-VL. Sources: transformers, modeling_qwen3 and modeling_qwen2_5_vl.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/qwen_vision.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

/// Suffixes of the layers that LoRA usually trains.
inline const std::vector<std::string> kDecoderLoraTargets = {"q_proj", "k_proj", "v_proj", "o_proj"};

struct DecoderConfig {
  int64_t vocab_size = 151936, hidden_size = 4096, intermediate_size = 22016, num_hidden_layers = 32,
          num_attention_heads = 32, num_key_value_heads = 32, head_dim = 128;
  double rms_norm_eps = 1e-6, rope_theta = 10000;
  bool qkv_bias = false, out_bias = false;  // of attention's projections
  bool qk_norm = true;                      // whether queries and keys of each head are normalized
  std::string hidden_act = "silu";
};
/// Qwen3Model, and Qwen3ForCausalLM, whose output projection is not used.
struct Qwen3Config : DecoderConfig {
  /// Throws invalid_config for sliding windows, scaled rotary positions and a number of heads that key-value heads do
  /// not divide.
  static Qwen3Config from_json(const nlohmann::json& config);
};
/// Qwen2_5_VLForConditionalGeneration.
struct Qwen25VlConfig : DecoderConfig {
  /// Numbers of feature pairs of a head that rotate with a token's time, row and column, in this order; for text all
  /// three are the token's position.
  std::vector<int64_t> mrope_section;
  std::optional<QwenVisionConfig> vision;  // the image encoder; absent in configs of the language model alone

  /// Reads `text_config`, or the whole config if that is absent, as in some files. Throws as Qwen3Config::from_json.
  static Qwen25VlConfig from_json(const nlohmann::json& config);
};

/// A user message in Qwen3's chat template with the start of the answer; `thinks`: the model thinks first, else the
/// template contains an empty thought.
std::string qwen3_chat(const std::string& prompt, bool thinks);

/// ids: [B, L] s32, with padding only after a text. `layers` numbers hidden states as transformers does: 0 for the
/// embeddings, i for the output of layer i, num_hidden_layers for the last layer's after the final norm. Returns them
/// in this order, [B, L, hidden_size] each. Attention is causal, so padding does not change the tokens before it.
/// `lengths`: s32 [B], number of tokens of each text, at least 1: padding attends to the tokens only, as in
/// transformers with a mask. Absent: padding also attends to the padding before it.
std::vector<Tensor> decoder_hidden_states(const Scope& s, const DecoderConfig& config, Tensor ids,
                                          const std::vector<int64_t>& layers, Tensor lengths = {});
/// An image in a text. `features`: of image_in_text. `first`: index of the image's first token in every sample's text.
/// All samples have images of the same sizes at the same indices.
struct ImageInText {
  Tensor features;  // [B, rows, columns, hidden_size]
  int64_t first;
};
/// The tokens of an image, from the image encoder, whose parameters are `s / "visual" / …`. pixels: [B, H, W, C], input
/// of qwen_vision → [B, rows, columns, hidden_size]. Throws invalid_config for a model without one.
Tensor image_in_text(const Scope& s, const Qwen25VlConfig& config, Tensor pixels);
/// The same for texts with images, in order. Values of `ids` at an image's tokens are not read. An image's tokens have
/// the time of its first token, and rows and columns counted from there; the next text position follows the largest of
/// these.
std::vector<Tensor> decoder_hidden_states(const Scope& s, const Qwen25VlConfig& config, Tensor ids,
                                          const std::vector<int64_t>& layers, const std::vector<ImageInText>& images);
/// Creates every parameter (registry.h) except the image encoder's, which only some families use.
void trace_decoder(const Scope& s, const DecoderConfig& config);
/// Names of the parameters in files of whole language models, with or without images.
WeightNameMap causal_decoder_names(const DecoderConfig& config);

}  // namespace md
