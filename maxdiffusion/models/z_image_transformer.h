// ZImageTransformer2DModel: the denoiser of Z-Image, a transformer over patches of latents and the embeddings of a text
// as one sequence, the image's tokens first. Separate refiner blocks process each of them before. All sizes come from
// diffusers' config.json; parameter names are diffusers'. Sources: Alibaba Z-Image Team 2025; diffusers 0.42,
// transformer_z_image.py.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct StepReuse;  // models/step_reuse.h

/// Numbers of image tokens and of text tokens are padded to multiples of this, with trained padding tokens.
inline constexpr int64_t kZImageTokens = 32;

/// Default of the key logical_axis_rules. Source: MaxDiffusion, configs/base_zimage.yml; keys and values are sharded as
/// queries.
inline constexpr const char* kZImageAxisRules = R"([
  ['batch', ['data', 'fsdp']], ['activation_batch', ['data', 'fsdp']], ['activation_length', 'context'],
  ['activation_kv_length', 'context'], ['activation_heads', 'tensor'], ['activation_kv', 'tensor'],
  ['heads', 'tensor'], ['mlp', 'tensor'], ['embed', 'fsdp'], ['norm', 'tensor'],
  ['conv_batch', ['data', 'fsdp']], ['out_channels', 'tensor'], ['conv_out', 'fsdp']])";

struct ZImageTransformerConfig {
  int64_t in_channels = 16, dim = 3840, n_layers = 30, n_refiner_layers = 2, n_heads = 30, cap_feat_dim = 2560;
  double norm_eps = 1e-5, rope_theta = 256, t_scale = 1000;
  bool qk_norm = true;
  /// Rotary features of a head for text position, row and column; positions are less than axes_lens.
  std::vector<int64_t> axes_dims = {32, 48, 48}, axes_lens = {1024, 512, 512};

  static constexpr int64_t kPatch = 2;  // rows and columns of latents in a token
  int64_t head_dim() const { return dim / n_heads; }
  /// Throws invalid_config as UNetConfig::from_json does.
  static ZImageTransformerConfig from_json(const nlohmann::json& config);
};

struct ZImageInputs {
  Tensor sample;   // [B, h, w, in_channels], h and w even
  Tensor time;     // [B], f32, from 0 (noise) to 1 (data)
  Tensor text;     // [B, L, cap_feat_dim], L a multiple of kZImageTokens
  Tensor lengths;  // s32 [B]: number of rows of `text` that are the sample's tokens, 0 counts as 1; the others are not
                   // read
  StepReuse* reuse = {};  // null: nothing is reused
};
/// Returns [B, h, w, in_channels], f32: the direction from noise to data that the model is trained to predict; samplers
/// use its negative. Timestep embedding, norms, modulation and the last projection are computed in f32.
Tensor z_image_transformer(const Scope& s, const ZImageTransformerConfig& config, const ZImageInputs& in);

/// Creates every parameter (registry.h).
void trace_z_image_transformer(const Scope& s, const ZImageTransformerConfig& config);

}  // namespace md
