// UNet2DConditionModel: the denoiser of Stable Diffusion and SDXL. All sizes come from config.json as diffusers
// writes it. Parameter names are diffusers'. Source: diffusers, UNet2DConditionModel; Podell et al. 2023 (SDXL).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct StepReuse;  // models/step_reuse.h

struct UNetConfig {
  int64_t sample_size = 128, in_channels = 4, out_channels = 4;
  bool flip_sin_to_cos = true;
  double freq_shift = 0;
  std::vector<std::string> down_block_types, up_block_types;
  std::optional<std::string> mid_block_type = "UNetMidBlock2DCrossAttn";
  std::vector<int64_t> block_out_channels, layers_per_block, transformer_layers_per_block, num_heads;  // per level
  std::vector<bool> only_cross_attention;
  std::vector<int64_t> cross_attention_dim;  // per level
  int64_t norm_num_groups = 32;
  double norm_eps = 1e-5;
  std::string act_fn = "silu";
  bool use_linear_projection = false, upcast_attention = false;
  int64_t downsample_padding = 1;
  double mid_block_scale_factor = 1;
  std::optional<std::string> addition_embed_type;  // "text_time"
  int64_t addition_time_embed_dim = 256, projection_class_embeddings_input_dim = 0;
  std::optional<int64_t> time_cond_proj_dim;

  /// Number of resnets of the up path, which is that of skip connections.
  int64_t up_layers() const;
  /// P of UNetInputs::text_embeds; 0 without micro-conditioning.
  int64_t pooled_width() const {
    return addition_embed_type ? projection_class_embeddings_input_dim - 6 * addition_time_embed_dim : 0;
  }

  /// Throws invalid_config naming the field, its value and the supported values. Unsupported fields that change the
  /// architecture must have their default; none is ignored.
  static UNetConfig from_json(const nlohmann::json& config);
};

struct UNetInputs {
  Tensor sample;                            // [B, H, W, in_channels]
  Tensor timestep;                          // [B] f32 or s32
  Tensor encoder_hidden_states;             // [B, L, cross_attention_dim]
  Tensor text_rows = {};                    // s32 [B]: as Transformer2DOptions::context_rows
  Tensor text_embeds = {};                  // [B, P]   with addition_embed_type text_time
  Tensor time_ids = {};                     // [B, 6]   with addition_embed_type text_time
  std::vector<Tensor> down_residuals = {};  // ControlNet: added to the skips, in order
  Tensor mid_residual = {};
  /// FreeU (Si et al. 2023): s1, s2, b1, b2. At the first up block the lowest frequencies of skips are multiplied by s1
  /// and the first half of the other channels by b1, at the second by s2 and b2.
  std::optional<std::array<double, 4>> freeu = {};
  /// Transformer2DOptions::image_attention of every attention to the text (IP-Adapter).
  std::function<Tensor(const std::string& path, Tensor q)> image_attention = {};
  /// Added at the end of each down block, in order, and to the mid block's output (T2I-Adapter), [B, h, w, C] each.
  std::vector<Tensor> adapter_features = {};
  StepReuse* reuse = {};      // of its deep levels; null: nothing is reused
  Tensor timestep_cond = {};  // [B, time_cond_proj_dim]   with time_cond_proj_dim (guidance embedding of LCM)
};
/// Results of the encoder half, which a ControlNet copies: skip connections and the output of the mid block.
struct UNetFeatures {
  std::vector<Tensor> skips;  // [B, h, w, C] each, finest first
  Tensor mid;
  Tensor temb, text;  // inputs of every block: the time embedding [B, T] after its activation, the text [B, L, D]
};
/// `hint` [B, H, W, block_out_channels[0]], if present, is added after conv_in. skips: the number of skip connections
/// that are computed, without the mid block; 0: all, and the mid block.
UNetFeatures unet2d_features(const Scope& s, const UNetConfig& config, const UNetInputs& in, Tensor hint = {},
                             size_t skips = 0);

/// Prediction [B, H, W, out_channels], f32.
Tensor unet2d(const Scope& s, const UNetConfig& config, const UNetInputs& in);

/// Zero inputs of the smallest supported sizes, for tracing the parameters.
UNetInputs smallest_unet_inputs(Graph& g, const UNetConfig& config);
/// Creates every parameter (registry.h).
void trace_unet2d(const Scope& s, const UNetConfig& config);

}  // namespace md
