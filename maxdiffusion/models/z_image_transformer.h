// ZImageTransformer2DModel: the denoiser of Z-Image, a transformer over patches of latents and the embeddings of a text
// as one sequence, the image's tokens first. Both are refined by blocks of their own before. All sizes come from
// config.json as diffusers writes it; parameter names are diffusers'. Sources: Alibaba Z-Image Team 2025; diffusers
// 0.42, transformer_z_image.py.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

/// Image tokens and text tokens are filled up to multiples of this with learnt tokens.
inline constexpr int64_t kZImageTokens = 32;

/// How its axes lie on a mesh, the key logical_axis_rules. Source: MaxDiffusion, configs/base_zimage.yml, and keys and
/// values as queries.
inline constexpr const char* kZImageAxisRules = R"([
  ['batch', ['data', 'fsdp']], ['activation_batch', ['data', 'fsdp']], ['activation_length', 'context'],
  ['activation_kv_length', 'context'], ['activation_heads', 'tensor'], ['activation_kv', 'tensor'],
  ['heads', 'tensor'], ['mlp', 'tensor'], ['embed', 'fsdp'], ['norm', 'tensor'],
  ['conv_batch', ['data', 'fsdp']], ['out_channels', 'tensor'], ['conv_out', 'fsdp']])";

struct ZImageTransformerConfig {
  int64_t in_channels = 16, dim = 3840, n_layers = 30, n_refiner_layers = 2, n_heads = 30, cap_feat_dim = 2560;
  double norm_eps = 1e-5, rope_theta = 256, t_scale = 1000;
  bool qk_norm = true;
  /// Features of a head that turn with the place in the text, the row and the column; places are below axes_lens.
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
  Tensor lengths;  // s32 [B]: rows of `text` that are tokens of the sample, 0 read as 1; the others are not read
};
/// [B, h, w, in_channels], f32: from data to noise, as the model was trained to predict; samplers take its negative.
/// The time's embedding, norms, modulation and the last projection are computed in f32.
Tensor z_image_transformer(const Scope& s, const ZImageTransformerConfig& config, const ZImageInputs& in);

/// Requests every parameter (registry.h).
void trace_z_image_transformer(const Scope& s, const ZImageTransformerConfig& config);

}  // namespace md
