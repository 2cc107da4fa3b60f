#include "maxdiffusion/models/flux2_transformer.h"

#include <nlohmann/json.hpp>
#include <string>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/joint_blocks.h"
#include "maxdiffusion/models/step_reuse.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

using Config = Flux2TransformerConfig;
using joint::Modulation;
constexpr joint::HeadNames kOfBoth = {"to_q", "to_k", "to_v", "norm_q", "norm_k", value::kLin1Hidden};

constexpr bool kBias = false;  // of all linear layers

joint::Sizes sizes(const Config& c) { return {c.num_attention_heads, c.attention_head_dim, c.eps, kBias}; }

Tensor linear(const Scope& s, Tensor x, int64_t out, const std::string& in_axis, const std::string& out_axis) {
  return joint::linear(s, x, out, in_axis, out_axis, kBias);
}

/// Input of all modulations, from timestep and guidance: SiLU of the sum of their embeddings, [B, D].
Tensor embed_conditions(const Scope& root, const Config& c, const Flux2Inputs& in) {
  ScopeOptions o = root.options();
  o.activations = DType::f32;
  const Scope s = root.with(o) / "time_guidance_embed";
  auto path = s.path_scope();
  auto of_number = [&](const char* name, Tensor t) {
    return joint::embedded_number(s / name, t, c.width(), c.timestep_guidance_channels, kBias);
  };
  Tensor y = of_number("timestep_embedder", cast(in.timestep, DType::f32));
  if (c.guidance_embeds) y = y + of_number("guidance_embedder", cast(in.guidance, DType::f32) * 1000);
  return cast(silu(y), root.dtype());
}

/// silu(first half) · second half, of the last axis.
Tensor gated_linear_unit(Tensor x) {
  const std::vector<Tensor> halves = split(x, 2, 2);
  return named(silu(halves[0]) * halves[1], value::kFfnActivation);
}

Tensor feed_forward(const Scope& s, const Config& c, Tensor x) {
  auto path = s.path_scope();
  Tensor h = shard(linear(s / "linear_in", x, 2 * c.mlp_width(), axis::kEmbed, axis::kMlp),
                   {axis::kBatch, axis::kLength, axis::kMlp});
  return linear(s / "linear_out", gated_linear_unit(h), c.width(), axis::kMlp, axis::kEmbed);
}

/// Inputs that all blocks share.
struct Shared {
  std::vector<Modulation> image, text, both;
  nn::Rotary positions;
};

/// The image's stream, normalized and modulated for the attention of a block.
Tensor image_input(const Scope& s, const Config& c, Tensor image, const Shared& shared) {
  return joint::modulated(s / "norm1", joint::stream(image), shared.image[0], c.eps);
}

/// streams: text and image.
std::vector<Tensor> double_block(const Scope& s, const Config& c, const std::vector<Tensor>& streams,
                                 const Shared& shared) {
  auto path = s.path_scope();
  Tensor text = joint::stream(streams[0]), image = joint::stream(streams[1]);
  Tensor image_in = image_input(s, c, image, shared);
  const joint::Attended y =
      joint::attend_jointly(s / "attn", sizes(c), joint::modulated(s / "norm1_context", text, shared.text[0], c.eps),
                            image_in, shared.positions);
  auto rest = [&](Tensor x, Tensor attended, const std::vector<Modulation>& m, const char* norm, const char* ff) {
    x = joint::gated(x, attended, m[0]);
    return joint::gated(x, feed_forward(s / ff, c, joint::modulated(s / norm, x, m[1], c.eps)), m[1]);
  };
  return {rest(text, y.text, shared.text, "norm2_context", "ff_context"),
          rest(image, y.image, shared.image, "norm2", "ff")};
}

/// x: the text's tokens, then the image's.
Tensor single_block(const Scope& s, const Config& c, Tensor x, const Shared& shared) {
  auto path = s.path_scope();
  const Scope attn = s / "attn";
  const int64_t d = c.width(), end = 3 * d + 2 * c.mlp_width();
  x = joint::stream(x);
  Tensor n = joint::modulated(s / "norm", x, shared.both[0], c.eps);
  Tensor all = named(linear(attn / "to_qkv_mlp_proj", n, end, axis::kEmbed, axis::kMlp), value::kLin1Hidden);
  auto part = [&](int64_t from, int64_t to) { return joint::stream(slice_axis(all, 2, from, to)); };
  const joint::Heads heads = joint::heads_of(attn, sizes(c), part(0, d), part(d, 2 * d), part(2 * d, 3 * d), kOfBoth);
  Tensor both =
      concatenate({joint::attend(attn, heads, shared.positions), gated_linear_unit(slice_axis(all, 2, 3 * d, end))}, 2);
  Tensor y = named(linear(attn / "to_out", both, d, axis::kMlp, axis::kEmbed), value::kLin2Hidden);
  return joint::gated(x, y, shared.both[0]);
}

/// Positions of the text, the sample and the reference images, in the order of their tokens.
nn::Rotary positions_of(Graph& g, const Config& c, const Flux2Inputs& in) {
  std::vector<Tensor> cosines, sines;
  auto add = [&](const Dims& grid, int64_t time) {
    const nn::Rotary r = nn::grid_rotary(g, grid, c.axes_dims_rope, c.rope_theta, {time, 0, 0, 0});
    cosines.push_back(r.cosines), sines.push_back(r.sines);
  };
  add({1, 1, 1, in.text.dim(1)}, 0);
  add({1, in.sample.dim(1), in.sample.dim(2), 1}, 0);
  for (int64_t time = 0; const Tensor& x : in.references) add({1, x.dim(1), x.dim(2), 1}, time += kFlux2ReferenceTime);
  return {concatenate(cosines, 1), concatenate(sines, 1)};
}

/// [B, h, w, C] → [B, h·w, C].
Tensor tokens_of(Tensor x) { return reshape(x, {x.dim(0), x.dim(1) * x.dim(2), x.dim(3)}); }

void check_inputs(const Config& c, const Flux2Inputs& in) {
  Tensor x = in.sample;
  auto shown = [](Tensor t) { return t ? to_string(t.shape()) : "absent"; };
  check(x && x.rank() == 4 && x.dim(3) == c.in_channels, Code::invalid_graph,
        "flux2_transformer: sample is {}, expected [B, h, w, {}]", shown(x), c.in_channels);
  const int64_t batch = x.dim(0);
  check(in.timestep && in.timestep.dims() == Dims{batch}, Code::invalid_graph,
        "flux2_transformer: timestep is {}, expected [{}]", shown(in.timestep), batch);
  check(in.text && in.text.rank() == 3 && in.text.dim(0) == batch && in.text.dim(2) == c.joint_attention_dim,
        Code::invalid_graph, "flux2_transformer: text is {}, expected [{}, L, {}]", shown(in.text), batch,
        c.joint_attention_dim);
  check(c.guidance_embeds ? in.guidance && in.guidance.dims() == Dims{batch} : !in.guidance, Code::invalid_graph,
        "flux2_transformer: guidance is {}, expected {}, since guidance_embeds of this config is {}",
        shown(in.guidance), c.guidance_embeds ? "[" + std::to_string(batch) + "]" : "none", c.guidance_embeds);
  for (const Tensor& r : in.references)
    check(r && r.rank() == 4 && r.dim(0) == batch && r.dim(3) == c.in_channels, Code::invalid_graph,
          "flux2_transformer: a reference image is {}, expected [{}, h, w, {}]", shown(r), batch, c.in_channels);
}

}  // namespace

Flux2TransformerConfig Flux2TransformerConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "Flux2Transformer2DModel config");
  Flux2TransformerConfig c;
  r.neutral("patch_size", {1});  // latents are packed before the model
  c.in_channels = r.get("in_channels", c.in_channels);
  c.out_channels = r.get_optional<int64_t>("out_channels");
  c.num_layers = r.get("num_layers", c.num_layers);
  c.num_single_layers = r.get("num_single_layers", c.num_single_layers);
  c.attention_head_dim = r.get("attention_head_dim", c.attention_head_dim);
  c.num_attention_heads = r.get("num_attention_heads", c.num_attention_heads);
  c.joint_attention_dim = r.get("joint_attention_dim", c.joint_attention_dim);
  c.timestep_guidance_channels = r.get("timestep_guidance_channels", c.timestep_guidance_channels);
  c.mlp_ratio = r.get("mlp_ratio", c.mlp_ratio);
  c.axes_dims_rope = r.get("axes_dims_rope", c.axes_dims_rope);
  c.rope_theta = r.get("rope_theta", c.rope_theta);
  c.eps = r.get("eps", c.eps);
  c.guidance_embeds = r.get("guidance_embeds", c.guidance_embeds);
  r.finish();

  r.positive({{"in_channels", c.in_channels},
              {"out_channels", c.out_channels.value_or(1)},
              {"num_layers", c.num_layers},
              {"num_single_layers", c.num_single_layers},
              {"attention_head_dim", c.attention_head_dim},
              {"num_attention_heads", c.num_attention_heads},
              {"joint_attention_dim", c.joint_attention_dim}});
  check(c.timestep_guidance_channels > 0 && c.timestep_guidance_channels % 2 == 0, Code::invalid_config,
        "{}: 'timestep_guidance_channels' is {}, expected an even number above 0", r.what(),
        c.timestep_guidance_channels);
  check(c.mlp_ratio > 0 && c.mlp_width() > 0, Code::invalid_config, "{}: 'mlp_ratio' is {}, expected a number above 0",
        r.what(), c.mlp_ratio);
  joint::check_rotary_axes(r, c.axes_dims_rope, 4, c.attention_head_dim);
  return c;
}

Tensor flux2_transformer(const Scope& s, const Config& c, const Flux2Inputs& in) {
  auto path = s.path_scope();
  check_inputs(c, in);
  const int64_t rows = in.sample.dim(1), columns = in.sample.dim(2), length = in.text.dim(1);
  Tensor conditions = embed_conditions(s, c, in);
  auto modulations = [&](const char* name, int64_t uses) {
    return joint::modulations(s / name / "linear", conditions, c.width(), uses, kBias);
  };
  const Shared shared{modulations("double_stream_modulation_img", 2), modulations("double_stream_modulation_txt", 2),
                      modulations("single_stream_modulation", 1), positions_of(s.graph(), c, in)};

  std::vector<Tensor> tokens = {tokens_of(in.sample)};
  for (const Tensor& x : in.references) tokens.push_back(tokens_of(x));
  auto embedded = [&](const char* name, Tensor x) {
    return joint::stream(linear(s / name, cast(x, s.dtype()), c.width(), "", axis::kEmbed));
  };
  Tensor image = embedded("x_embedder", concatenate(tokens, 1)), text = embedded("context_embedder", in.text);
  using Streams = BlockSequence::Streams;
  const auto doubled = [&](const Scope& b, const Streams& xs) { return double_block(b, c, xs, shared); };
  const BlockSequence blocks{
      .start = {text, image},
      .first = [&](const Scope& root, const Streams& xs) { return doubled(root / "transformer_blocks" / 0, xs); },
      .rest =
          [&](const Scope& root, const Streams& xs, int64_t from) {
            const Streams streams = nn::repeat(root / "transformer_blocks", c.num_layers, xs, doubled, from);
            Tensor x = nn::repeat(root / "single_transformer_blocks", c.num_single_layers, concatenate(streams, 1),
                                  [&](const Scope& b, Tensor y) { return single_block(b, c, y, shared); });
            return slice_axis(x, 1, length, x.dim(1));
          },
      .input = [&](const Scope& root,
                   const Streams& xs) { return image_input(root / "transformer_blocks" / 0, c, xs[1], shared); }};
  Tensor x = slice_axis(run_blocks(s, blocks, in.reuse), 1, 0, rows * columns);
  const int64_t channels = c.out_channels.value_or(c.in_channels);
  return reshape(joint::last_layer(s, x, conditions, channels, c.eps, kBias),
                 {in.sample.dim(0), rows, columns, channels});
}

void trace_flux2_transformer(const Scope& s, const Config& c) {
  auto zeros = [&](Dims dims) { return full(s.graph(), 0, {DType::f32, std::move(dims)}); };
  Flux2Inputs in{
      .sample = zeros({1, 1, 1, c.in_channels}), .timestep = zeros({1}), .text = zeros({1, 1, c.joint_attention_dim})};
  if (c.guidance_embeds) in.guidance = zeros({1});
  flux2_transformer(s, c, in);
}

}  // namespace md
