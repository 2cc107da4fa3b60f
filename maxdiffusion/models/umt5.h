// UMT5's text encoder: T5's, with a table of relative positions in every layer. Sources: Chung et al. 2023 (UniMax);
// Raffel et al. 2020 (T5), section 2.1; transformers, modeling_umt5 (UMT5EncoderModel).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct Umt5Config {
  int64_t vocab_size = 250112, d_model = 512, d_kv = 64, d_ff = 1024, num_layers = 8, num_heads = 6,
          relative_attention_num_buckets = 32, relative_attention_max_distance = 128;
  double layer_norm_epsilon = 1e-6;
  std::string dense_act_fn = "gelu_new";
  bool is_gated_act = true;

  static Umt5Config from_json(const nlohmann::json& config);
};

/// ids: [B, L] s32; mask: [B, L], not 0 where there is a token, 0 where there is padding → [B, L, d_model] f32, also
/// where there is padding. Sums over layers are f32 whatever the activations are, and so is the product with wo, whose
/// inputs are large.
Tensor umt5(const Scope& s, const Umt5Config& config, Tensor ids, Tensor mask);
/// Asks for every parameter (registry.h).
void trace_umt5(const Scope& s, const Umt5Config& config);

/// The row of the table for a key `distance` tokens behind the query (negative: before it), of `buckets` rows: half of
/// them are for keys behind, and of a half one half is for single distances, the other for ranges that grow up to
/// `max_distance` and beyond.
int64_t relative_position_bucket(int64_t distance, int64_t buckets, int64_t max_distance);

}  // namespace md
