#include "maxdiffusion/models/flux_transformer.h"

#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/rotary.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

using Config = FluxTransformerConfig;
constexpr double kEps = 1e-6;
constexpr int64_t kSinusoids = 256, kMlpRatio = 4;

Tensor f32(Tensor x) { return cast(x, DType::f32); }

Tensor linear(const Scope& s, Tensor x, int64_t out, const std::string& in_axis, const std::string& out_axis) {
  return nn::linear(s, x, {.out = out, .in_axis = in_axis, .out_axis = out_axis});
}
/// A stream as it goes from block to block: [B, L, D].
Tensor stream(Tensor x) { return shard(x, {axis::kBatch, axis::kLength, axis::kHeadsAct}); }

// ---- conditions

/// Of time, guidance and the pooled text, what all modulations read: SiLU of the sum, [B, D].
Tensor embed_conditions(const Scope& root, const Config& c, const FluxInputs& in) {
  ScopeOptions o = root.options();
  o.activations = DType::f32;
  const Scope s = root.with(o) / "time_text_embed";
  auto path = s.path_scope();
  auto mlp = [&](const Scope& m, Tensor x) {
    Tensor h = silu(linear(m / "linear_1", x, c.width(), axis::kEmbed, axis::kMlp));
    return linear(m / "linear_2", h, c.width(), axis::kMlp, axis::kEmbed);
  };
  auto of_number = [&](const char* name, Tensor t) {
    return mlp(s / name, nn::timestep_embedding(t, kSinusoids, true, 0));
  };
  Tensor y = of_number("timestep_embedder", in.timestep);
  if (c.guidance_embeds) y = y + of_number("guidance_embedder", f32(in.guidance) * 1000);
  y = y + mlp(s / "text_embedder", f32(in.pooled));
  return cast(silu(y), root.dtype());
}

/// One use of a block's modulation, each [B, 1, D] f32.
struct Modulation {
  Tensor shift, scale, gate;
};
/// `uses` times shift, scale and gate.
std::vector<Modulation> modulations(const Scope& s, const Config& c, Tensor conditions, int64_t uses) {
  Tensor y = linear(s / "linear", conditions, 3 * uses * c.width(), axis::kEmbed, axis::kMlp);
  const std::vector<Tensor> parts = split(expand_dims(shard(f32(y), {axis::kBatch, ""}), 1), 3 * uses, 2);
  std::vector<Modulation> out;
  for (size_t i = 0; i < parts.size(); i += 3) out.push_back({parts[i], parts[i + 1], parts[i + 2]});
  return out;
}

/// LN(x) · (1 + scale) + shift, f32.
Tensor modulated(const Scope& s, Tensor x, Tensor shift, Tensor scale) {
  return nn::layer_norm(s, f32(x), kEps, false) * (scale + 1) + shift;
}
/// In the dtype of x.
Tensor modulated(const Scope& s, Tensor x, const Modulation& m) {
  return cast(modulated(s, x, m.shift, m.scale), x.dtype());
}
Tensor gated(Tensor to, Tensor y, const Modulation& m) { return stream(cast(f32(to) + f32(y) * m.gate, to.dtype())); }

// ---- attention

struct Heads {
  Tensor q, k, v;  // [B, L, N, d]
};
/// What projections and norms of one stream are called, and what the projections' results are for remat policies.
struct HeadNames {
  const char *q, *k, *v, *norm_q, *norm_k, *projected;
};
constexpr HeadNames kOfImage = {"to_q", "to_k", "to_v", "norm_q", "norm_k", value::kImgQkvProj},
                    kOfText = {"add_q_proj",   "add_k_proj",   "add_v_proj",
                               "norm_added_q", "norm_added_k", value::kTxtQkvProj},
                    kOfBoth = {"to_q", "to_k", "to_v", "norm_q", "norm_k", value::kLin1Hidden};

Heads heads_of(const Scope& s, const Config& c, Tensor x, const HeadNames& names) {
  auto project = [&](const char* name) {
    Tensor y = stream(linear(s / name, x, c.width(), axis::kEmbed, axis::kHeads));
    return reshape(named(y, names.projected), {x.dim(0), x.dim(1), c.num_attention_heads, c.attention_head_dim});
  };
  auto normed = [&](const char* name, Tensor y) { return nn::rms_norm(s / name, y, kEps); };
  return {named(normed(names.norm_q, project(names.q)), value::kQueryProj),
          named(normed(names.norm_k, project(names.k)), value::kKeyProj), named(project(names.v), value::kValueProj)};
}

/// [B, L, D].
Tensor local_attention(const Scope& s, const Heads& h, const nn::Rotary& positions) {
  Tensor y = nn::self_attend(nn::rotated(h.q, positions), nn::rotated(h.k, positions), h.v,
                             nn::attention_options(s, {.batch = axis::kBatch,
                                                       .length = axis::kLength,
                                                       .kv_length = axis::kKvLength,
                                                       .heads = axis::kHeadsAct,
                                                       .head_dim = axis::kKv}));
  return stream(reshape(y, {y.dim(0), y.dim(1), y.dim(2) * y.dim(3)}));
}

/// Text tokens, then image tokens.
Tensor joined(Tensor text, Tensor image) { return concatenate({text, image}, 1); }

/// Wide in the middle, before the projection back.
Tensor widened(const Scope& s, const Config& c, Tensor x) {
  Tensor h = linear(s, x, kMlpRatio * c.width(), axis::kEmbed, axis::kMlp);
  return named(gelu_tanh(shard(h, {axis::kBatch, axis::kLength, axis::kMlp})), value::kFfnActivation);
}

// ---- blocks

/// What attention gave, then the feed-forward part, added to one stream.
Tensor after_attention(const Scope& s, const Config& c, Tensor x, Tensor attended, const std::vector<Modulation>& m,
                       const char* norm, const char* feed_forward) {
  x = gated(x, attended, m[0]);
  const Scope ff = s / feed_forward;
  auto path = ff.path_scope();
  Tensor h = widened(ff / "net.0.proj", c, modulated(s / norm, x, m[1]));
  return gated(x, linear(ff / "net.2", h, c.width(), axis::kMlp, axis::kEmbed), m[1]);
}

/// streams: the text's and the image's.
std::vector<Tensor> double_block(const Scope& s, const Config& c, const std::vector<Tensor>& streams, Tensor conditions,
                                 const nn::Rotary& positions) {
  auto path = s.path_scope();
  Tensor text = stream(streams[0]), image = stream(streams[1]);
  const Scope attn = s / "attn";
  const std::vector<Modulation> of_image = modulations(s / "norm1", c, conditions, 2),
                                of_text = modulations(s / "norm1_context", c, conditions, 2);
  const Heads i = heads_of(attn, c, modulated(s / "norm1", image, of_image[0]), kOfImage),
              t = heads_of(attn, c, modulated(s / "norm1_context", text, of_text[0]), kOfText);
  Tensor y = local_attention(attn, {joined(t.q, i.q), joined(t.k, i.k), joined(t.v, i.v)}, positions);
  const int64_t length = text.dim(1);
  Tensor to_image =
             linear(attn / "to_out.0", slice_axis(y, 1, length, y.dim(1)), c.width(), axis::kHeads, axis::kEmbed),
         to_text = linear(attn / "to_add_out", slice_axis(y, 1, 0, length), c.width(), axis::kHeads, axis::kEmbed);
  return {after_attention(s, c, text, to_text, of_text, "norm2_context", "ff_context"),
          after_attention(s, c, image, to_image, of_image, "norm2", "ff")};
}

/// x: the text's tokens, then the image's.
Tensor single_block(const Scope& s, const Config& c, Tensor x, Tensor conditions, const nn::Rotary& positions) {
  auto path = s.path_scope();
  x = stream(x);
  const Modulation m = modulations(s / "norm", c, conditions, 1)[0];
  Tensor n = modulated(s / "norm", x, m);
  Tensor attended = local_attention(s / "attn", heads_of(s / "attn", c, n, kOfBoth), positions);
  Tensor both = concatenate({attended, widened(s / "proj_mlp", c, n)}, 2);
  return gated(x, named(linear(s / "proj_out", both, c.width(), axis::kMlp, axis::kEmbed), value::kLin2Hidden), m);
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
  r.neutral("patch_size", {1});  // latents are packed before they come
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
  check(c.axes_dims_rope.size() == 3, Code::invalid_config, "{}: 'axes_dims_rope' has {} entries, expected 3", r.what(),
        c.axes_dims_rope.size());
  for (int64_t v : c.axes_dims_rope)
    check(v >= 0 && v % 2 == 0, Code::invalid_config, "{}: 'axes_dims_rope' holds {}, expected even numbers", r.what(),
          v);
  const int64_t features = std::accumulate(c.axes_dims_rope.begin(), c.axes_dims_rope.end(), int64_t{0});
  check(features == c.attention_head_dim, Code::invalid_config,
        "{}: the sum of 'axes_dims_rope' is {}, expected 'attention_head_dim' = {}", r.what(), features,
        c.attention_head_dim);
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

  const std::vector<Tensor> streams = nn::repeat(
      s / "transformer_blocks", c.num_layers, std::vector{text, image},
      [&](const Scope& b, const std::vector<Tensor>& xs) { return double_block(b, c, xs, conditions, positions); });
  Tensor x = nn::repeat(s / "single_transformer_blocks", c.num_single_layers, joined(streams[0], streams[1]),
                        [&](const Scope& b, Tensor y) { return single_block(b, c, y, conditions, positions); });

  x = slice_axis(x, 1, length, x.dim(1));
  Tensor m = linear(s / "norm_out.linear", conditions, 2 * c.width(), axis::kEmbed, axis::kMlp);
  const std::vector<Tensor> parts = split(expand_dims(shard(f32(m), {axis::kBatch, ""}), 1), 2, 2);
  x = modulated(s / "norm_out", x, parts[1], parts[0]);
  return linear(s / "proj_out", x, c.out_channels.value_or(c.in_channels), axis::kEmbed, "");
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
