// The image encoder of Qwen2.5-VL: a transformer over patches of an image of any size. Most layers attend within
// windows. The features of each square of patches become one token of the language model. Parameter names are
// transformers'. Sources: Bai et al. 2025 (Qwen2.5-VL), section 2.1; transformers, modeling_qwen2_5_vl.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct QwenVisionConfig {
  int64_t depth = 32, hidden_size = 3584, intermediate_size = 3420, num_heads = 16, in_channels = 3, patch_size = 14,
          spatial_merge_size = 2, temporal_patch_size = 2, window_size = 112, out_hidden_size = 3584;
  std::vector<int64_t> fullatt_block_indexes = {7, 15, 23, 31};  // layers that attend to the whole image
  std::string hidden_act = "silu";

  /// Pixels along the side of a token; sides of images are multiples of it.
  int64_t token_size() const { return patch_size * spatial_merge_size; }
  /// Patches along a side of a window.
  int64_t window() const { return window_size / token_size() * spatial_merge_size; }
  /// Throws invalid_config as UNetConfig::from_json does.
  static QwenVisionConfig from_json(const nlohmann::json& config);
};

/// pixels: [B, H, W, in_channels], normalized by the model's image processor → [B, tokens, out_hidden_size], row by
/// row.
Tensor qwen_vision(const Scope& s, const QwenVisionConfig& config, Tensor pixels);

}  // namespace md
