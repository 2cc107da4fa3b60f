// T5's text encoder, and UMT5's, which has a table of relative positions in every layer where T5 has one for all.
// Sources: Raffel et al. 2020 (T5), section 2.1; Chung et al. 2023 (UniMax); transformers, modeling_t5 (T5EncoderModel)
// and modeling_umt5 (UMT5EncoderModel).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

/// Ends of the names of the layers that LoRA usually changes.
inline const std::vector<std::string> kT5LoraTargets = {"SelfAttention.q", "SelfAttention.k", "SelfAttention.v",
                                                        "SelfAttention.o"};

struct T5Config {
  int64_t vocab_size = 250112, d_model = 512, d_kv = 64, d_ff = 1024, num_layers = 8, num_heads = 6,
          relative_attention_num_buckets = 32, relative_attention_max_distance = 128;
  double layer_norm_epsilon = 1e-6;
  std::string dense_act_fn = "gelu_new";
  bool is_gated_act = true;
  bool shared_positions = false;  // the first layer's table of relative positions is that of all: T5, not UMT5

  /// Which of the two it is say `model_type` ("t5", "umt5") or the class in `architectures`. Throws invalid_config
  /// where neither does, and for other models.
  static T5Config from_json(const nlohmann::json& config);
};

/// ids: [B, L] s32; mask: [B, L], not 0 where there is a token, 0 where there is padding, or absent: nothing is
/// padding → [B, L, d_model] f32, also where there is padding. Sums over layers are f32 whatever the activations are,
/// and so is the product with wo, whose inputs are large.
Tensor t5_encoder(const Scope& s, const T5Config& config, Tensor ids, Tensor mask = {});
/// Asks for every parameter (registry.h).
void trace_t5_encoder(const Scope& s, const T5Config& config);

/// The row of the table for a key `distance` tokens behind the query (negative: before it), of `buckets` rows: half of
/// them are for keys behind, and of a half one half is for single distances, the other for ranges that grow up to
/// `max_distance` and beyond.
int64_t relative_position_bucket(int64_t distance, int64_t buckets, int64_t max_distance);

}  // namespace md
