// Flux2Transformer2DModel: the denoiser of FLUX.2, a transformer over the latents of an image, optionally those of
// reference images of other sizes after them, and the embeddings of a text. Double-stream blocks with joint attention
// precede single-stream blocks; all blocks of a kind share their modulation. All sizes come from diffusers'
// config.json; parameter names are diffusers'. Sources: Black Forest Labs 2025 (FLUX.2); diffusers 0.42,
// transformer_flux2.py.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct StepReuse;  // models/step_reuse.h

/// Default of the key logical_axis_rules. Source: MaxDiffusion, configs/base_flux2klein.yml, with FLUX.1's rules for
/// sequences.
inline constexpr const char* kFlux2AxisRules = R"([
  ['batch', ['data', 'fsdp']], ['activation_batch', ['data', 'fsdp']], ['activation_heads', 'tensor'],
  ['activation_length', 'context'], ['activation_kv_length', 'context'], ['activation_kv', 'tensor'],
  ['mlp', 'tensor'], ['embed', 'fsdp'], ['heads', 'tensor'], ['conv_batch', ['data', 'fsdp']],
  ['out_channels', 'tensor'], ['conv_out', 'fsdp']])";

struct Flux2TransformerConfig {
  int64_t in_channels = 128, num_layers = 8, num_single_layers = 48, attention_head_dim = 128, num_attention_heads = 48,
          joint_attention_dim = 15360, timestep_guidance_channels = 256;
  double mlp_ratio = 3, rope_theta = 2000, eps = 1e-6;
  bool guidance_embeds = true;
  /// Rotary features of a head for time, row, column and text position.
  std::vector<int64_t> axes_dims_rope = {32, 32, 32, 32};
  std::optional<int64_t> out_channels;  // absent: in_channels

  /// D: features of a token.
  int64_t width() const { return num_attention_heads * attention_head_dim; }
  /// Hidden width of the feed-forward networks, ⌊D · mlp_ratio⌋.
  int64_t mlp_width() const { return static_cast<int64_t>(static_cast<double>(width()) * mlp_ratio); }
  /// Throws invalid_config as UNetConfig::from_json does.
  static Flux2TransformerConfig from_json(const nlohmann::json& config);
};

struct Flux2Inputs {
  Tensor sample;                        // [B, h, w, in_channels]: a token for each row and column
  Tensor timestep;                      // [B], f32, from 0 (data) to 1000 (noise)
  Tensor text;                          // [B, L, joint_attention_dim]
  Tensor guidance = {};                 // [B], f32, the guidance scale (4); present if and only if guidance_embeds
  std::vector<Tensor> references = {};  // [B, h', w', in_channels] each: noise-free latents of reference images
  StepReuse* reuse = {};                // null: nothing is reused
};
/// Time position of reference image i, from 0, is (i + 1) · this; the sample's is 0.
inline constexpr int64_t kFlux2ReferenceTime = 10;

/// Returns [B, h, w, out_channels], f32, for the sample only. Condition embeddings, norms, modulation and the last
/// projection are computed in f32.
Tensor flux2_transformer(const Scope& s, const Flux2TransformerConfig& config, const Flux2Inputs& in);

/// Creates every parameter (registry.h).
void trace_flux2_transformer(const Scope& s, const Flux2TransformerConfig& config);

}  // namespace md
