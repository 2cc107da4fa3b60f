#include "maxdiffusion/models/clip_vision.h"

#include <cmath>

#include "maxdiffusion/models/clip_encoder.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// [B, H, W, C] → [B, 1 + patches, width]: the class token, then patches row by row, with their positions.
Tensor embed(const Scope& s, const ClipVisionConfig& c, Tensor pixels) {
  auto path = s.path_scope();
  const int64_t width = c.hidden_size;
  Tensor patches =
      nn::conv2d(s / "patch_embedding", cast(pixels, s.dtype()),
                 {.out = width, .kernel = c.patch_size, .stride = c.patch_size, .padding = 0, .bias = false});
  patches = reshape(patches, {pixels.dim(0), c.tokens() - 1, width});
  const Init wide = init::normal(std::pow(static_cast<double>(width), -0.5));
  Tensor first = cast(s.param("class_embedding", {width}, {""}, wide), s.dtype());
  Tensor positions = (s / "position_embedding").param("weight", {c.tokens(), width}, {"", ""}, init::normal(0.02));
  return concatenate({broadcast_to(first, {pixels.dim(0), 1, width}), patches}, 1) + cast(positions, s.dtype());
}

}  // namespace

ClipVisionConfig ClipVisionConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "CLIPVisionModel config");
  ClipVisionConfig c;
  r.neutral("model_type", {"clip_vision_model"});
  c.hidden_size = r.get("hidden_size", c.hidden_size);
  c.intermediate_size = r.get("intermediate_size", c.intermediate_size);
  c.num_hidden_layers = r.get("num_hidden_layers", c.num_hidden_layers);
  c.num_attention_heads = r.get("num_attention_heads", c.num_attention_heads);
  c.num_channels = r.get("num_channels", c.num_channels);
  c.image_size = r.get("image_size", c.image_size);
  c.patch_size = r.get("patch_size", c.patch_size);
  c.projection_dim = r.get("projection_dim", c.projection_dim);
  c.hidden_act = r.get("hidden_act", c.hidden_act);
  c.layer_norm_eps = r.get("layer_norm_eps", c.layer_norm_eps);
  for (const auto& name : r.get<std::vector<std::string>>("architectures", {"CLIPVisionModel"})) {
    check(name == "CLIPVisionModel" || name == "CLIPVisionModelWithProjection", Code::invalid_config,
          "{}: 'architectures' holds '{}', which is not one of: CLIPVisionModel, CLIPVisionModelWithProjection",
          r.what(), name);
    c.with_projection = name == "CLIPVisionModelWithProjection";
  }
  check(c.num_attention_heads > 0 && c.hidden_size % c.num_attention_heads == 0, Code::invalid_config,
        "{}: 'hidden_size' {} does not divide into 'num_attention_heads' {}", r.what(), c.hidden_size,
        c.num_attention_heads);
  check(c.patch_size > 0 && c.image_size >= c.patch_size, Code::invalid_config,
        "{}: 'image_size' is {}, expected at least one patch of 'patch_size' {}", r.what(), c.image_size, c.patch_size);
  return c;
}

ClipVisionOutput clip_vision(const Scope& root, const ClipVisionConfig& c, Tensor pixels) {
  auto path = root.path_scope();
  check(pixels.rank() == 4 && pixels.dim(1) == c.image_size && pixels.dim(2) == c.image_size &&
            pixels.dim(3) == c.num_channels,
        Code::invalid_graph, "clip_vision: pixels are {}, expected [B, {}, {}, {}]", to_string(pixels.shape()),
        c.image_size, c.image_size, c.num_channels);
  const Scope s = root / "vision_model";
  Tensor x = nn::layer_norm(s / "pre_layrnorm", embed(s / "embeddings", c, pixels), c.layer_norm_eps);
  ClipVisionOutput y;
  y.hidden_states = clip_encoder(s / "encoder", x,
                                 {.layers = c.num_hidden_layers,
                                  .heads = c.num_attention_heads,
                                  .intermediate = c.intermediate_size,
                                  .activation = c.hidden_act,
                                  .eps = c.layer_norm_eps});
  Tensor token = squeeze(slice_axis(y.hidden_states.back(), 1, 0, 1), 1);
  y.pooled = nn::layer_norm(s / "post_layernorm", token, c.layer_norm_eps);
  if (c.with_projection) {
    const Init out = init::normal(std::pow(static_cast<double>(c.hidden_size), -0.5));
    y.image_embeds =
        nn::linear(root / "visual_projection", y.pooled, {.out = c.projection_dim, .bias = false, .init = out});
  }
  return y;
}

void trace_clip_vision(const Scope& s, const ClipVisionConfig& c) {
  clip_vision(s, c, full(s.graph(), 0, {DType::f32, {1, c.image_size, c.image_size, c.num_channels}}));
}

}  // namespace md
