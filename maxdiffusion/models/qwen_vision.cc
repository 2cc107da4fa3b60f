#include "maxdiffusion/models/qwen_vision.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/rotary.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

using Config = QwenVisionConfig;
constexpr double kEps = 1e-6, kTheta = 10000;

/// [B, H, W, C] → [B, rows, columns, hidden_size] of patches. The model takes temporal_patch_size frames at a time: an
/// image is repeated so often.
Tensor embed(const Scope& s, const Config& c, Tensor pixels) {
  auto path = s.path_scope();
  const int64_t p = c.patch_size, b = pixels.dim(0), rows = pixels.dim(1) / p, columns = pixels.dim(2) / p;
  const Dims dims = {c.hidden_size, c.in_channels, c.temporal_patch_size, p, p};
  Tensor w = s.param("weight", dims, {"", "", "", "", ""}, init::normal(0.02));
  w = cast(sum(cast(w, DType::f32), {2}), s.dtype());  // [out, C, p, p]
  Tensor x = transpose(reshape(cast(pixels, s.dtype()), {b, rows, p, columns, p, c.in_channels}), {0, 1, 3, 5, 2, 4});
  x = reshape(x, {b, rows, columns, c.in_channels * p * p});
  return dot(x, reshape(w, {c.hidden_size, x.dim(3)}),
             {.lhs_contract = {3}, .rhs_contract = {1}, .precision = s.options().precision});
}

struct Grid {
  int64_t rows, columns;
};

/// Attention of tokens [B, rows · columns, N, d] within windows of side × side patches; windows at the right and bottom
/// edge may be smaller.
Tensor windowed(const Scope& s, Tensor q, Tensor k, Tensor v, const Grid& grid, int64_t side) {
  const int64_t b = q.dim(0), heads = q.dim(2), d = q.dim(3);
  const AttentionOptions how = nn::attention_options(s);
  struct Part {
    int64_t begin, end, window;  // consecutive windows of one size
  };
  auto parts_of = [&](int64_t all) {
    std::vector<Part> parts;
    const int64_t whole = all / side * side;
    if (whole > 0) parts.push_back({0, whole, side});
    if (whole < all) parts.push_back({whole, all, all - whole});
    return parts;
  };
  std::vector<Tensor> bands;
  for (const Part& rows : parts_of(grid.rows)) {
    std::vector<Tensor> blocks;
    for (const Part& columns : parts_of(grid.columns)) {
      const int64_t height = rows.window, width = columns.window;
      const int64_t down = (rows.end - rows.begin) / height, across = (columns.end - columns.begin) / width;
      auto windows = [&](Tensor x) {
        x = reshape(x, {b, grid.rows, grid.columns, heads * d});
        x = slice_axis(slice_axis(x, 1, rows.begin, rows.end), 2, columns.begin, columns.end);
        x = transpose(reshape(x, {b, down, height, across, width, heads * d}), {0, 1, 3, 2, 4, 5});
        return reshape(x, {b * down * across, height * width, heads, d});
      };
      Tensor y = nn::self_attend(windows(q), windows(k), windows(v), how);
      y = transpose(reshape(y, {b, down, across, height, width, heads * d}), {0, 1, 3, 2, 4, 5});
      blocks.push_back(reshape(y, {b, rows.end - rows.begin, columns.end - columns.begin, heads * d}));
    }
    bands.push_back(concatenate(blocks, 2));
  }
  return reshape(concatenate(bands, 1), {b, grid.rows * grid.columns, heads, d});
}

Tensor self_attention(const Scope& s, const Config& c, Tensor x, const nn::Rotary& places, const Grid& grid,
                      bool whole) {
  auto path = s.path_scope();
  const int64_t b = x.dim(0), n = x.dim(1), d = c.hidden_size / c.num_heads;
  const std::vector<Tensor> parts = split(nn::linear(s / "qkv", x, {.out = 3 * c.hidden_size}), 3, 2);
  auto heads = [&](size_t i) { return reshape(parts[i], {b, n, c.num_heads, d}); };
  Tensor q = nn::rotated(heads(0), places, nn::RotaryPairs::halves),
         k = nn::rotated(heads(1), places, nn::RotaryPairs::halves), v = heads(2);
  Tensor y = whole ? nn::self_attend(q, k, v, nn::attention_options(s)) : windowed(s, q, k, v, grid, c.window());
  return nn::linear(s / "proj", reshape(y, {b, n, c.hidden_size}), {.out = c.hidden_size});
}

Tensor feed_forward(const Scope& s, const Config& c, Tensor x) {
  auto path = s.path_scope();
  auto into = [&](const char* name) { return nn::linear(s / name, x, {.out = c.intermediate_size}); };
  return nn::linear(s / "down_proj", nn::activation(c.hidden_act, into("gate_proj")) * into("up_proj"),
                    {.out = c.hidden_size});
}

/// Merges squares of patches to tokens.
Tensor merge(const Scope& s, const Config& c, Tensor x, const Grid& grid) {
  auto path = s.path_scope();
  const int64_t b = x.dim(0), m = c.spatial_merge_size, width = m * m * c.hidden_size;
  x = reshape(nn::rms_norm(s / "ln_q", x, kEps), {b, grid.rows / m, m, grid.columns / m, m, c.hidden_size});
  x = reshape(transpose(x, {0, 1, 3, 2, 4, 5}), {b, grid.rows / m * (grid.columns / m), width});
  return nn::linear(s / "mlp.2", nn::activation("gelu", nn::linear(s / "mlp.0", x, {.out = width})),
                    {.out = c.out_hidden_size});
}

}  // namespace

QwenVisionConfig QwenVisionConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "Qwen2.5-VL config: vision_config");
  Config c;
  c.depth = r.get("depth", c.depth);
  c.hidden_size = r.get("hidden_size", c.hidden_size);
  c.intermediate_size = r.get("intermediate_size", c.intermediate_size);
  c.num_heads = r.get("num_heads", c.num_heads);
  c.in_channels = r.get("in_channels", r.get("in_chans", c.in_channels));
  c.patch_size = r.get("patch_size", c.patch_size);
  c.spatial_merge_size = r.get("spatial_merge_size", c.spatial_merge_size);
  c.temporal_patch_size = r.get("temporal_patch_size", c.temporal_patch_size);
  c.window_size = r.get("window_size", c.window_size);
  c.out_hidden_size = r.get("out_hidden_size", c.out_hidden_size);
  c.fullatt_block_indexes = r.get("fullatt_block_indexes", c.fullatt_block_indexes);
  c.hidden_act = r.get("hidden_act", c.hidden_act);
  r.positive({{"depth", c.depth},
              {"hidden_size", c.hidden_size},
              {"intermediate_size", c.intermediate_size},
              {"num_heads", c.num_heads},
              {"in_channels", c.in_channels},
              {"patch_size", c.patch_size},
              {"spatial_merge_size", c.spatial_merge_size},
              {"temporal_patch_size", c.temporal_patch_size},
              {"out_hidden_size", c.out_hidden_size}});
  check(c.hidden_size % (4 * c.num_heads) == 0, Code::invalid_config,
        "{}: 'hidden_size' is {}, expected a multiple of 4 times 'num_heads' = {}", r.what(), c.hidden_size,
        c.num_heads);
  check(c.window_size >= c.token_size(), Code::invalid_config,
        "{}: 'window_size' is {}, expected {} or more, 'patch_size' times 'spatial_merge_size'", r.what(),
        c.window_size, c.token_size());
  return c;
}

Tensor qwen_vision(const Scope& s, const Config& c, Tensor pixels) {
  auto path = s.path_scope();
  const int64_t unit = c.token_size();
  check(pixels.rank() == 4 && pixels.dim(1) > 0 && pixels.dim(2) > 0 && pixels.dim(1) % unit == 0 &&
            pixels.dim(2) % unit == 0 && pixels.dim(3) == c.in_channels,
        Code::invalid_graph, "qwen_vision: pixels are {}, expected [B, H, W, {}] with sides that are multiples of {}",
        to_string(pixels.shape()), c.in_channels, unit);
  Tensor x = embed(s / "patch_embed.proj", c, pixels);
  const Grid grid{x.dim(1), x.dim(2)};
  x = reshape(x, {x.dim(0), grid.rows * grid.columns, c.hidden_size});
  const int64_t half = c.hidden_size / c.num_heads / 2;
  const nn::Rotary places = nn::grid_rotary(s.graph(), {grid.rows, grid.columns}, {half, half}, kTheta);
  for (int64_t i = 0; i < c.depth; ++i) {
    const Scope block = s / "blocks" / i;
    const bool whole = std::ranges::count(c.fullatt_block_indexes, i) > 0;
    x = nn::remat(
        block,
        [&](Tensor h) {
          h = h + self_attention(block / "attn", c, nn::rms_norm(block / "norm1", h, kEps), places, grid, whole);
          return h + feed_forward(block / "mlp", c, nn::rms_norm(block / "norm2", h, kEps));
        },
        x);
  }
  return merge(s / "merger", c, x, grid);
}

}  // namespace md
