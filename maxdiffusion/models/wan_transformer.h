// WanTransformer3DModel: the denoiser of Wan 2.1 and 2.2, a transformer over patches of video latents. All sizes come
// from config.json as diffusers writes it; parameter names are diffusers'. Sources: Wan Team 2025 (Wan); diffusers
// 0.42, transformer_wan.py; for computations in f32, the original program.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct StepReuse;  // models/step_reuse.h

/// Default of the key logical_axis_rules. Source: MaxDiffusion, configs/base_wan_14b.yml.
inline constexpr const char* kWanAxisRules = R"([
  ['batch', ['data', 'fsdp']], ['activation_batch', ['data', 'fsdp']],
  ['activation_self_attn_heads', ['context', 'tensor']], ['activation_cross_attn_q_length', ['context', 'tensor']],
  ['activation_length', 'context'], ['activation_heads', 'tensor'], ['mlp', 'tensor'], ['embed', ['context', 'fsdp']],
  ['heads', 'tensor'], ['norm', 'tensor'], ['conv_batch', ['data', 'context', 'fsdp']], ['out_channels', 'tensor'],
  ['conv_out', 'context']])";

struct WanTransformerConfig {
  std::vector<int64_t> patch_size = {1, 2, 2};  // frames, rows and columns of one token
  int64_t num_attention_heads = 40, attention_head_dim = 128, in_channels = 16, out_channels = 16, text_dim = 4096,
          freq_dim = 256, ffn_dim = 13824, num_layers = 40;
  bool cross_attn_norm = true;
  double eps = 1e-6;
  std::optional<int64_t> image_dim;  // set: the model has an image input (embeddings)
  std::optional<int64_t>
      added_kv_proj_dim;            // set: separate keys and values for the image; else it is concatenated to the text
  int64_t rope_max_seq_len = 1024;  // tokens along frames, rows or columns, at most
  std::optional<int64_t> pos_embed_seq_len;  // set: number of image embeddings, with learned positions

  /// D: features of a token.
  int64_t width() const { return num_attention_heads * attention_head_dim; }
  /// Throws invalid_config as UNetConfig::from_json does.
  static WanTransformerConfig from_json(const nlohmann::json& config);
};

/// Keys and values of cross attention for all blocks, in the dtype of activations. They depend only on text and image,
/// so sampling steps share them.
struct WanContext {
  Tensor text_keys, text_values;              // [num_layers, B, L, D]
  Tensor image_keys = {}, image_values = {};  // [num_layers, B, N, D]   with added_kv_proj_dim
};

struct WanInputs {
  Tensor sample;      // [B, F, H, W, in_channels]; F, H and W are multiples of patch_size
  Tensor timestep;    // [B], or [B, S] with a timestep for each token (frames first, then rows); f32 or s32
  Tensor text = {};   // [B, L, text_dim]
  Tensor image = {};  // [B, N, image_dim]   with image_dim; two images are 2N embeddings
  const WanContext* context = {};  // replaces text and image
  StepReuse* reuse = {};  // null: nothing is reused; where it replaces the blocks, text, image and context are unused
};
/// [B, F, H, W, out_channels], f32. The condition embedder, norms, modulation and the last projection compute in f32;
/// parameters of all but the last are stored in f32.
Tensor wan_transformer(const Scope& s, const WanTransformerConfig& config, const WanInputs& in);
/// Keys and values of `text` [B, L, text_dim] and, if the config has an image input, `image` [B, N, image_dim].
WanContext wan_context(const Scope& s, const WanTransformerConfig& config, Tensor text, Tensor image = {});

/// Creates every parameter (registry.h).
void trace_wan_transformer(const Scope& s, const WanTransformerConfig& config);

}  // namespace md
