// FluxTransformer2DModel: the denoiser of Flux dev and schnell, a transformer over packed latents of an image and the
// embeddings of a text. Double-stream blocks with joint attention precede single-stream blocks. All sizes come from
// diffusers' config.json; parameter names are diffusers'. Sources: Black Forest Labs 2024 (Flux); diffusers 0.42,
// transformer_flux.py.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct StepReuse;  // models/step_reuse.h

/// Default of the key logical_axis_rules. Source: MaxDiffusion, configs/base_flux_dev.yml.
inline constexpr const char* kFluxAxisRules = R"([
  ['batch', ['data', 'fsdp']], ['activation_batch', ['data', 'fsdp']], ['activation_heads', 'tensor'],
  ['activation_length', 'context'], ['activation_kv_length', 'context'], ['activation_kv', 'tensor'],
  ['mlp', 'tensor'], ['embed', 'fsdp'], ['heads', 'tensor'], ['conv_batch', ['data', 'fsdp']],
  ['out_channels', 'tensor'], ['conv_out', 'fsdp']])";

struct FluxTransformerConfig {
  int64_t patch_size = 1, in_channels = 64, num_layers = 19, num_single_layers = 38, attention_head_dim = 128,
          num_attention_heads = 24, joint_attention_dim = 4096, pooled_projection_dim = 768;
  bool guidance_embeds = false;
  std::vector<int64_t> axes_dims_rope = {16, 56, 56};  // rotary features of a head for (unused), row and column
  std::optional<int64_t> out_channels;                 // absent: in_channels

  /// D: features of a token.
  int64_t width() const { return num_attention_heads * attention_head_dim; }
  /// Throws invalid_config as UNetConfig::from_json does.
  static FluxTransformerConfig from_json(const nlohmann::json& config);
};

struct FluxInputs {
  Tensor sample;          // [B, S, in_channels]: latents, 2×2 packed into a token, row by row
  int64_t rows, columns;  // of tokens; S = rows·columns
  Tensor timestep;        // [B], f32, from 0 (data) to 1000 (noise)
  Tensor text;            // [B, L, joint_attention_dim]
  Tensor pooled;          // [B, pooled_projection_dim]
  Tensor guidance = {};   // [B], f32, the guidance scale (3.5); present if and only if guidance_embeds
  StepReuse* reuse = {};  // null: nothing is reused
};
/// [B, S, out_channels], f32. Condition embeddings, norms, modulation and the last projection are
/// computed in f32.
Tensor flux_transformer(const Scope& s, const FluxTransformerConfig& config, const FluxInputs& in);

/// Creates every parameter (registry.h).
void trace_flux_transformer(const Scope& s, const FluxTransformerConfig& config);

}  // namespace md
