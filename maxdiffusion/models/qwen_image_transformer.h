// QwenImageTransformer2DModel: the denoiser of Qwen-Image, a transformer over packed latents of an image and the
// embeddings of a text, as two streams (joint_blocks.h). Positions are centred on the image; text positions follow it
// along the diagonal. All sizes come from diffusers' config.json; parameter names are diffusers'. Sources: Qwen-Image
// Team 2025, section 3; diffusers 0.42, transformer_qwenimage.py.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

struct StepReuse;  // models/step_reuse.h

struct QwenImageTransformerConfig {
  int64_t patch_size = 2, in_channels = 64, num_layers = 60, attention_head_dim = 128, num_attention_heads = 24,
          joint_attention_dim = 3584;
  std::optional<int64_t> out_channels = 16;            // of a latent; absent: in_channels
  std::vector<int64_t> axes_dims_rope = {16, 56, 56};  // rotary features of a head for image, row and column

  bool zero_cond_t = false;  // whether tokens of reference images have timestep 0
  /// D: features of a token.
  int64_t width() const { return num_attention_heads * attention_head_dim; }
  int64_t token_channels() const { return patch_size * patch_size * out_channels.value_or(in_channels); }
  /// Throws invalid_config as UNetConfig::from_json does.
  static QwenImageTransformerConfig from_json(const nlohmann::json& config);
};

/// Latents of an image, 2×2 packed into a token, row by row.
struct QwenImageTokens {
  Tensor tokens;  // [B, rows · columns, in_channels]
  int64_t rows, columns;
};
struct QwenImageInputs {
  Tensor sample;          // [B, S, in_channels]: latents, 2×2 packed into a token, row by row
  int64_t rows, columns;  // of tokens; S = rows·columns
  Tensor timestep;        // [B], f32, from 0 (data) to 1000 (noise)
  Tensor text;            // [B, L, joint_attention_dim]
  Tensor lengths;         // s32 [B]: number of rows of `text` that are the sample's tokens; predictions do not depend
                          // on the others
  /// Reference images: tokens after the sample's own, without predictions. Each has its own position along the first
  /// axis, and is centred where the sample is.
  std::vector<QwenImageTokens> references = {};
  StepReuse* reuse = {};  // null: nothing is reused
};
/// Returns [B, S, patch_size²·out_channels], f32. Timestep embedding, norms, modulation and the last projection are
/// computed in f32.
Tensor qwen_image_transformer(const Scope& s, const QwenImageTransformerConfig& config, const QwenImageInputs& in);

/// Creates every parameter (registry.h).
void trace_qwen_image_transformer(const Scope& s, const QwenImageTransformerConfig& config);
/// Names of the parameters in ComfyUI's files: diffusers' names, with or without a prefix.
WeightNameMap original_qwen_image_names(const QwenImageTransformerConfig& config);

}  // namespace md
