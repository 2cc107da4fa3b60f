#include "maxdiffusion/models/flux_transformer.h"

#include <nlohmann/json.hpp>
#include <string>

#include "maxdiffusion/autodiff/named_values.h"
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

using Config = FluxTransformerConfig;
using joint::f32, joint::linear, joint::stream;
constexpr joint::BlockNames kNames = {"norm1.linear", "norm1_context.linear", "ff", "ff_context"};
constexpr joint::HeadNames kOfBoth = {"to_q", "to_k", "to_v", "norm_q", "norm_k", value::kLin1Hidden};

joint::Sizes sizes(const Config& c) { return {c.num_attention_heads, c.attention_head_dim}; }

// ---- conditions

/// Input of all modulations, from timestep, guidance and pooled text: SiLU of the sum of their embeddings, [B, D].
Tensor embed_conditions(const Scope& root, const Config& c, const FluxInputs& in) {
  ScopeOptions o = root.options();
  o.activations = DType::f32;
  const Scope s = root.with(o) / "time_text_embed";
  auto path = s.path_scope();
  auto of_number = [&](const char* name, Tensor t) { return joint::embedded_number(s / name, t, c.width()); };
  Tensor y = of_number("timestep_embedder", in.timestep);
  if (c.guidance_embeds) y = y + of_number("guidance_embedder", f32(in.guidance) * 1000);
  y = y + joint::condition_mlp(s / "text_embedder", f32(in.pooled), c.width());
  return cast(silu(y), root.dtype());
}

// ---- blocks

/// x: the text's tokens, then the image's.
Tensor single_block(const Scope& s, const Config& c, Tensor x, Tensor conditions, const nn::Rotary& positions) {
  auto path = s.path_scope();
  x = stream(x);
  const joint::Modulation m = joint::modulations(s / "norm.linear", conditions, c.width(), 1)[0];
  Tensor n = joint::modulated(s / "norm", x, m);
  Tensor attended = joint::attend(s / "attn", joint::heads_of(s / "attn", sizes(c), n, kOfBoth), positions);
  Tensor both = concatenate({attended, joint::widened(s / "proj_mlp", n, c.width())}, 2);
  return joint::gated(x, named(linear(s / "proj_out", both, c.width(), axis::kMlp, axis::kEmbed), value::kLin2Hidden),
                      m);
}

void check_inputs(const Config& c, const FluxInputs& in) {
  Tensor x = in.sample;
  auto shown = [](Tensor t) { return t ? to_string(t.shape()) : "absent"; };
  check(x && x.rank() == 3 && x.dim(2) == c.in_channels && in.rows > 0 && in.columns > 0 &&
            x.dim(1) == in.rows * in.columns,
        Code::invalid_graph, "flux_transformer: sample is {} of {}×{} tokens, expected [B, {}, {}]", shown(x), in.rows,
        in.columns, in.rows * in.columns, c.in_channels);
  const int64_t batch = x.dim(0);
  check(in.timestep && in.timestep.dims() == Dims{batch}, Code::invalid_graph,
        "flux_transformer: timestep is {}, expected [{}]", shown(in.timestep), batch);
  check(in.text && in.text.rank() == 3 && in.text.dim(0) == batch && in.text.dim(2) == c.joint_attention_dim,
        Code::invalid_graph, "flux_transformer: text is {}, expected [{}, L, {}]", shown(in.text), batch,
        c.joint_attention_dim);
  check(in.pooled && in.pooled.dims() == Dims{batch, c.pooled_projection_dim}, Code::invalid_graph,
        "flux_transformer: pooled is {}, expected [{}, {}]", shown(in.pooled), batch, c.pooled_projection_dim);
  check(c.guidance_embeds ? in.guidance && in.guidance.dims() == Dims{batch} : !in.guidance, Code::invalid_graph,
        "flux_transformer: guidance is {}, expected {}, since guidance_embeds of this config is {}", shown(in.guidance),
        c.guidance_embeds ? "[" + std::to_string(batch) + "]" : "none", c.guidance_embeds);
}

}  // namespace

FluxTransformerConfig FluxTransformerConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "FluxTransformer2DModel config");
  FluxTransformerConfig c;
  r.neutral("patch_size", {1});  // latents are packed before the model
  c.in_channels = r.get("in_channels", c.in_channels);
  c.out_channels = r.get_optional<int64_t>("out_channels");
  c.num_layers = r.get("num_layers", c.num_layers);
  c.num_single_layers = r.get("num_single_layers", c.num_single_layers);
  c.attention_head_dim = r.get("attention_head_dim", c.attention_head_dim);
  c.num_attention_heads = r.get("num_attention_heads", c.num_attention_heads);
  c.joint_attention_dim = r.get("joint_attention_dim", c.joint_attention_dim);
  c.pooled_projection_dim = r.get("pooled_projection_dim", c.pooled_projection_dim);
  c.guidance_embeds = r.get("guidance_embeds", c.guidance_embeds);
  c.axes_dims_rope = r.get("axes_dims_rope", c.axes_dims_rope);
  r.finish();

  r.positive({{"in_channels", c.in_channels},
              {"out_channels", c.out_channels.value_or(1)},
              {"num_layers", c.num_layers},
              {"num_single_layers", c.num_single_layers},
              {"attention_head_dim", c.attention_head_dim},
              {"num_attention_heads", c.num_attention_heads},
              {"joint_attention_dim", c.joint_attention_dim},
              {"pooled_projection_dim", c.pooled_projection_dim}});
  joint::check_rotary_axes(r, c.axes_dims_rope, 3, c.attention_head_dim);
  return c;
}

Tensor flux_transformer(const Scope& s, const FluxTransformerConfig& c, const FluxInputs& in) {
  auto path = s.path_scope();
  check_inputs(c, in);
  Tensor conditions = embed_conditions(s, c, in);
  Tensor image = stream(linear(s / "x_embedder", cast(in.sample, s.dtype()), c.width(), "", axis::kEmbed)),
         text = stream(linear(s / "context_embedder", cast(in.text, s.dtype()), c.width(), "", axis::kEmbed));
  const int64_t length = text.dim(1);
  const nn::Rotary positions =
      nn::with_unrotated_prefix(length, nn::grid_rotary(s.graph(), {1, in.rows, in.columns}, c.axes_dims_rope));

  using Streams = BlockSequence::Streams;
  const joint::Block doubled{sizes(c), kNames, conditions, positions};
  const auto double_block = [&](const Scope& b, const Streams& xs) { return joint::block(b, doubled, xs); };
  const BlockSequence blocks{
      .start = {text, image},
      .first = [&](const Scope& root, const Streams& xs) { return double_block(root / "transformer_blocks" / 0, xs); },
      .rest =
          [&](const Scope& root, const Streams& xs, int64_t from) {
            const Streams streams = nn::repeat(root / "transformer_blocks", c.num_layers, xs, double_block, from);
            Tensor x =
                nn::repeat(root / "single_transformer_blocks", c.num_single_layers, concatenate(streams, 1),
                           [&](const Scope& b, Tensor y) { return single_block(b, c, y, conditions, positions); });
            return slice_axis(x, 1, length, x.dim(1));
          },
      .input = [&](const Scope& root,
                   const Streams& xs) { return joint::block_input(root / "transformer_blocks" / 0, doubled, xs[1]); }};
  return joint::last_layer(s, run_blocks(s, blocks, in.reuse), conditions, c.out_channels.value_or(c.in_channels));
}

void trace_flux_transformer(const Scope& s, const FluxTransformerConfig& c) {
  auto zeros = [&](Dims dims) { return full(s.graph(), 0, {DType::f32, std::move(dims)}); };
  FluxInputs in{.sample = zeros({1, 1, c.in_channels}),
                .rows = 1,
                .columns = 1,
                .timestep = zeros({1}),
                .text = zeros({1, 1, c.joint_attention_dim}),
                .pooled = zeros({1, c.pooled_projection_dim})};
  if (c.guidance_embeds) in.guidance = zeros({1});
  flux_transformer(s, c, in);
}

}  // namespace md
