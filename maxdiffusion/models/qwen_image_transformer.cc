#include "maxdiffusion/models/qwen_image_transformer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/joint_blocks.h"
#include "maxdiffusion/models/step_reuse.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/rotary.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

using Config = QwenImageTransformerConfig;
using joint::linear;
constexpr double kTextEps = 1e-6;
constexpr joint::BlockNames kNames = {"img_mod.1", "txt_mod.1", "img_mlp", "txt_mlp"};

/// SiLU of the timestep embedding, [B, D].
Tensor embed_time(const Scope& root, const Config& c, Tensor timestep) {
  ScopeOptions o = root.options();
  o.activations = DType::f32;
  const Scope s = root.with(o) / "time_text_embed.timestep_embedder";
  auto path = s.path_scope();
  return cast(silu(joint::embedded_number(s, joint::f32(timestep), c.width())), root.dtype());
}

nn::Rotary joined(const std::vector<nn::Rotary>& all, int64_t axis) {
  std::vector<Tensor> cosines, sines;
  for (const nn::Rotary& r : all) cosines.push_back(r.cosines), sines.push_back(r.sines);
  return {concatenate(cosines, axis), concatenate(sines, axis)};
}

struct Grid {
  int64_t rows, columns;
};

/// Positions of each image's tokens, with rows and columns counted from its centre, then of the text's tokens, with
/// equal numbers on all axes that start after the largest row and column of the images.
nn::Rotary positions(Graph& g, const Config& c, const std::vector<Grid>& images, int64_t text) {
  std::vector<nn::Rotary> all, axes;
  int64_t farthest = 0;
  for (const auto& [rows, columns] : images) {
    const auto image = static_cast<int64_t>(all.size());
    all.push_back(nn::grid_rotary(g, {1, rows, columns}, c.axes_dims_rope, 10000,
                                  {image, rows / 2 - rows, columns / 2 - columns}));
    farthest = std::max({farthest, rows / 2, columns / 2});
  }
  for (int64_t features : c.axes_dims_rope)
    if (features > 0) axes.push_back(nn::grid_rotary(g, {text}, {features}, 10000, {farthest}));
  all.push_back(joined(axes, 3));
  return joined(all, 1);
}

void check_inputs(const Config& c, const QwenImageInputs& in) {
  Tensor x = in.sample;
  auto shown = [](Tensor t) { return t ? to_string(t.shape()) : "absent"; };
  check(x && x.rank() == 3 && x.dim(2) == c.in_channels && in.rows > 0 && in.columns > 0 &&
            x.dim(1) == in.rows * in.columns,
        Code::invalid_graph, "qwen_image_transformer: sample is {} of {}×{} tokens, expected [B, {}, {}]", shown(x),
        in.rows, in.columns, in.rows * in.columns, c.in_channels);
  const int64_t batch = x.dim(0);
  check(in.timestep && in.timestep.dims() == Dims{batch}, Code::invalid_graph,
        "qwen_image_transformer: timestep is {}, expected [{}]", shown(in.timestep), batch);
  check(in.text && in.text.rank() == 3 && in.text.dim(0) == batch && in.text.dim(2) == c.joint_attention_dim,
        Code::invalid_graph, "qwen_image_transformer: text is {}, expected [{}, L, {}]", shown(in.text), batch,
        c.joint_attention_dim);
  for (const QwenImageTokens& r : in.references)
    check(r.tokens && r.rows > 0 && r.columns > 0 && r.tokens.dims() == Dims{batch, r.rows * r.columns, c.in_channels},
          Code::invalid_graph, "qwen_image_transformer: a reference is {} of {}×{} tokens, expected [{}, {}, {}]",
          shown(r.tokens), r.rows, r.columns, batch, r.rows * r.columns, c.in_channels);
  check(in.lengths && in.lengths.shape() == Shape{DType::s32, {batch}}, Code::invalid_graph,
        "qwen_image_transformer: lengths are {}, expected s32 [{}]", shown(in.lengths), batch);
}

}  // namespace

QwenImageTransformerConfig QwenImageTransformerConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "QwenImageTransformer2DModel config");
  QwenImageTransformerConfig c;
  // Switches of a distilled model, and of one that generates layers.
  for (const char* other : {"guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"}) r.neutral(other, {false});
  c.zero_cond_t = r.get("zero_cond_t", c.zero_cond_t);
  r.ignore({"pooled_projection_dim"});
  c.patch_size = r.get("patch_size", c.patch_size);
  c.in_channels = r.get("in_channels", c.in_channels);
  if (config.contains("out_channels")) c.out_channels = r.get_optional<int64_t>("out_channels");
  c.num_layers = r.get("num_layers", c.num_layers);
  c.attention_head_dim = r.get("attention_head_dim", c.attention_head_dim);
  c.num_attention_heads = r.get("num_attention_heads", c.num_attention_heads);
  c.joint_attention_dim = r.get("joint_attention_dim", c.joint_attention_dim);
  c.axes_dims_rope = r.get("axes_dims_rope", c.axes_dims_rope);
  r.finish();

  r.positive({{"patch_size", c.patch_size},
              {"in_channels", c.in_channels},
              {"out_channels", c.out_channels.value_or(1)},
              {"num_layers", c.num_layers},
              {"attention_head_dim", c.attention_head_dim},
              {"num_attention_heads", c.num_attention_heads},
              {"joint_attention_dim", c.joint_attention_dim}});
  joint::check_rotary_axes(r, c.axes_dims_rope, 3, c.attention_head_dim);
  return c;
}

Tensor qwen_image_transformer(const Scope& s, const Config& c, const QwenImageInputs& in) {
  auto path = s.path_scope();
  check_inputs(c, in);
  const int64_t sample_tokens = in.rows * in.columns;
  std::vector<Tensor> images = {in.sample};
  std::vector<Grid> grids = {{in.rows, in.columns}};
  for (const QwenImageTokens& r : in.references)
    images.push_back(cast(r.tokens, in.sample.dtype())), grids.push_back({r.rows, r.columns});
  Tensor tokens = images.size() == 1 ? in.sample : concatenate(images, 1);
  const int64_t image_tokens = tokens.dim(1);
  const bool two_times = c.zero_cond_t && image_tokens > sample_tokens;
  Tensor conditions = embed_time(s, c, two_times ? concatenate({in.timestep, in.timestep * 0.0}, 0) : in.timestep),
         of_references;
  if (two_times) {
    const std::vector<Tensor> halves = split(conditions, 2, 0);
    conditions = halves[0], of_references = halves[1];
  }
  Tensor image = joint::stream(linear(s / "img_in", cast(tokens, s.dtype()), c.width(), "", axis::kEmbed));
  Tensor text = nn::rms_norm(s / "txt_norm", cast(in.text, s.dtype()), kTextEps);
  text = joint::stream(linear(s / "txt_in", text, c.width(), "", axis::kEmbed));
  const joint::Block block{.sizes = {c.num_attention_heads, c.attention_head_dim},
                           .names = kNames,
                           .conditions = conditions,
                           .positions = positions(s.graph(), c, grids, text.dim(1)),
                           .lengths = in.lengths + image_tokens,
                           .reference_conditions = of_references,
                           .references = image_tokens - sample_tokens};
  using Streams = BlockSequence::Streams;
  const auto one = [&](const Scope& b, const Streams& xs) { return joint::block(b, block, xs); };
  const BlockSequence blocks{
      .start = {text, image},
      .first = [&](const Scope& root, const Streams& xs) { return one(root / "transformer_blocks" / 0, xs); },
      .rest = [&](const Scope& root, const Streams& xs,
                  int64_t from) { return nn::repeat(root / "transformer_blocks", c.num_layers, xs, one, from)[1]; },
      .input = [&](const Scope& root,
                   const Streams& xs) { return joint::block_input(root / "transformer_blocks" / 0, block, xs[1]); }};
  Tensor y = slice_axis(run_blocks(s, blocks, in.reuse), 1, 0, sample_tokens);
  return joint::last_layer(s, y, conditions, c.token_channels());
}

void trace_qwen_image_transformer(const Scope& s, const Config& c) {
  auto zeros = [&](Dims dims) { return full(s.graph(), 0, {DType::f32, std::move(dims)}); };
  qwen_image_transformer(s, c,
                         {.sample = zeros({1, 1, c.in_channels}),
                          .rows = 1,
                          .columns = 1,
                          .timestep = zeros({1}),
                          .text = zeros({1, 1, c.joint_attention_dim}),
                          .lengths = full(s.graph(), 1, {DType::s32, {1}})});
}

WeightNameMap original_qwen_image_names(const Config&) {
  return {.aliases =
              [](const std::string& name) {
                return std::vector<WeightAlias>{{.prefix = "", .name = name},
                                                {.prefix = "model.diffusion_model.", .name = name},
                                                {.prefix = "diffusion_model.", .name = name}};
              },
          .architecture = "qwen_image"};
}

}  // namespace md
