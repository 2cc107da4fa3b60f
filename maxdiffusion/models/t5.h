// T5's text encoder, and UMT5's, which has a table of relative positions in every layer; T5 shares one. Sources: Raffel
// et al. 2020 (T5), section 2.1; Chung et al. 2023 (UniMax); transformers, modeling_t5 (T5EncoderModel) and
// modeling_umt5 (UMT5EncoderModel).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

/// Suffixes of the layers that LoRA usually trains.
inline const std::vector<std::string> kT5LoraTargets = {"SelfAttention.q", "SelfAttention.k", "SelfAttention.v",
                                                        "SelfAttention.o"};

struct T5Config {
  int64_t vocab_size = 250112, d_model = 512, d_kv = 64, d_ff = 1024, num_layers = 8, num_heads = 6,
          relative_attention_num_buckets = 32, relative_attention_max_distance = 128;
  double layer_norm_epsilon = 1e-6;
  std::string dense_act_fn = "gelu_new";
  bool is_gated_act = true;
  bool shared_positions = false;  // all layers share the first layer's table of relative positions: T5, not UMT5

  /// `model_type` ("t5", "umt5") or the class in `architectures` selects the model. Throws invalid_config without
  /// either, and for other models.
  static T5Config from_json(const nlohmann::json& config);
};

/// ids: [B, L] s32; mask: [B, L], nonzero for tokens, 0 for padding; absent: no padding → [B, L, d_model] f32. The
/// residual stream and the product with wo, whose inputs are large, are f32.
Tensor t5_encoder(const Scope& s, const T5Config& config, Tensor ids, Tensor mask = {});
/// Creates every parameter (registry.h).
void trace_t5_encoder(const Scope& s, const T5Config& config);
/// Names in GGUF files. Source: llama.cpp, gguf-py (constants.py).
WeightNameMap llama_t5_names(const T5Config& config);

/// The row, of `buckets`, for a key `distance` tokens after the query (negative: before it). Half of the rows are for
/// later keys; in each half, one half is for single distances, the other for logarithmic ranges up to `max_distance`.
int64_t relative_position_bucket(int64_t distance, int64_t buckets, int64_t max_distance);

}  // namespace md
