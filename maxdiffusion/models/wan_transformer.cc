#include "maxdiffusion/models/wan_transformer.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/step_reuse.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/rotary.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

using Config = WanTransformerConfig;
/// Keys and values of one block: of the text, then of the image if it has separate ones.   [B, L, D] each.
using BlockContext = std::vector<Tensor>;

/// For layers that store and compute in f32 regardless of the model's types.
Scope wide(const Scope& s) {
  ScopeOptions o = s.options();
  o.weights = o.activations = DType::f32;
  return s.with(o);
}
Tensor f32(Tensor x) { return cast(x, DType::f32); }

Tensor linear(const Scope& s, Tensor x, int64_t out, const std::string& in_axis, const std::string& out_axis) {
  return nn::linear(
      s, x, {.out = out, .in_axis = in_axis, .out_axis = out_axis, .init = init::xavier_uniform({out, x.dim(-1)})});
}

struct MlpOptions {
  const char *first, *second, *activation;
  int64_t hidden, out;
  const char* dropout = nullptr;  // the dropout layer between them, if any
};
Tensor mlp(const Scope& s, Tensor x, const MlpOptions& o) {
  Tensor h = linear(s / o.first, x, o.hidden, axis::kEmbed, axis::kMlp);
  if (h.rank() == 3) h = shard(h, {axis::kBatch, axis::kLength, axis::kMlp});
  h = named(nn::activation(o.activation, h), value::kFfnActivation);
  if (o.dropout) h = nn::dropout(s / o.dropout, h);
  return linear(s / o.second, h, o.out, axis::kMlp, axis::kEmbed);
}

// ---- tokens

/// Numbers of tokens along frames, rows and columns.
Dims grid_of(const Config& c, Tensor sample) {
  Dims grid;
  for (size_t i = 0; i < 3; ++i) grid.push_back(sample.dim(static_cast<int64_t>(i) + 1) / c.patch_size[i]);
  return grid;
}

/// [B, F, H, W, C] → [B, S, D].
Tensor embed_patches(const Scope& s, const Config& c, Tensor x) {
  auto path = s.path_scope();
  const Dims &p = c.patch_size, n = grid_of(c, x);
  x = reshape(x, {x.dim(0), n[0], p[0], n[1], p[1], n[2], p[2], c.in_channels});
  x = transpose(x, {0, 1, 3, 5, 7, 2, 4, 6});  // to the order of the weight's dims
  x = reshape(x, {x.dim(0), n[0] * n[1] * n[2], c.in_channels * p[0] * p[1] * p[2]});
  const Weight weight{"weight",
                      {c.width(), c.in_channels, p[0], p[1], p[2]},
                      {axis::kConvOut, "", "", "", ""},
                      init::xavier_uniform({c.width(), x.dim(-1)})};
  Tensor y = s.product(weight, x, [precision = s.options().precision](Tensor in, Tensor w) {
    return dot(in, reshape(w, {w.dim(0), in.dim(-1)}),
               {.lhs_contract = {2}, .rhs_contract = {1}, .precision = precision});
  });
  return y + cast(s.param("bias", {c.width()}, {""}, init::zeros()), y.dtype());
}

/// [B, S, out_channels · patch] → [B, F, H, W, out_channels]; channels are the innermost part of a token.
Tensor join_patches(const Config& c, Tensor y, const Dims& n) {
  const Dims& p = c.patch_size;
  y = reshape(y, {y.dim(0), n[0], n[1], n[2], p[0], p[1], p[2], c.out_channels});
  y = transpose(y, {0, 1, 4, 2, 5, 3, 6, 7});
  return reshape(y, {y.dim(0), n[0] * p[0], n[1] * p[1], n[2] * p[2], c.out_channels});
}

/// Of a head's d features, the first d − 4·⌊d/6⌋ are for frames, then 2·⌊d/6⌋ each for rows and columns.
nn::Rotary rotary(Graph& g, const Config& c, const Dims& grid) {
  const int64_t d = c.attention_head_dim, side = 2 * (d / 6);
  return nn::grid_rotary(g, grid, {d - 2 * side, side, side});
}

// ---- conditions

struct Time {
  Tensor embedding;   // [B, T, D] f32; T is 1, or S with a time for each token
  Tensor modulation;  // [B, T, 6, D] f32
};
Time embed_time(const Scope& root, const Config& c, Tensor t, bool for_blocks) {
  const Scope s = wide(root) / "condition_embedder";
  auto path = s.path_scope();
  const int64_t batch = t.dim(0), times = t.rank() == 1 ? 1 : t.dim(1), width = c.width();
  Tensor x = nn::timestep_embedding(reshape(t, {batch * times}), c.freq_dim, true, 0);
  x = reshape(x, {batch, times, c.freq_dim});
  Time out{mlp(s / "time_embedder", x, {"linear_1", "linear_2", "silu", width, width}), {}};
  if (!for_blocks) return out;
  Tensor y = linear(s / "time_proj", silu(out.embedding), 6 * width, axis::kEmbed, axis::kMlp);
  out.modulation = shard(reshape(y, {batch, times, 6, width}), {axis::kBatch, axis::kLength, "", ""});
  return out;
}

/// [B, L, text_dim] → [B, L, D].
Tensor embed_text(const Scope& root, const Config& c, Tensor text) {
  const Scope s = wide(root) / "condition_embedder.text_embedder";
  auto path = s.path_scope();
  Tensor y = mlp(s, f32(text), {"linear_1", "linear_2", "gelu_tanh", c.width(), c.width()});
  return shard(cast(y, root.dtype()), {axis::kBatch, axis::kLength, axis::kKv});
}

/// [B, N, image_dim] → [B, N, D].
Tensor embed_image(const Scope& root, const Config& c, Tensor image) {
  const Scope s = wide(root) / "condition_embedder.image_embedder";
  auto path = s.path_scope();
  constexpr double kEps = 1e-5;
  Tensor x = f32(image);
  const int64_t in = x.dim(-1);
  if (c.pos_embed_seq_len) x = x + s.param("pos_embed", {1, *c.pos_embed_seq_len, in}, {}, init::zeros());
  x = nn::layer_norm(s / "norm1", x, kEps);
  x = mlp(s / "ff", x, {"net.0.proj", "net.2", "gelu", in, c.width()});
  x = nn::layer_norm(s / "norm2", x, kEps);
  return shard(cast(x, root.dtype()), {axis::kBatch, axis::kLength, axis::kKv});
}

/// Embeddings of the text and, if the config has one, of the image: inputs of the blocks.
struct Embedded {
  Tensor text, image;  // image: absent if concatenated to the text
};
Embedded embed_context(const Scope& s, const Config& c, Tensor text, Tensor image) {
  check(text && text.rank() == 3 && text.dim(2) == c.text_dim, Code::invalid_graph,
        "wan_transformer: text is {}, expected [B, L, {}]", text ? to_string(text.shape()) : "absent", c.text_dim);
  check(static_cast<bool>(image) == c.image_dim.has_value(), Code::invalid_graph,
        "wan_transformer: an image is {}, but image_dim of this config is {}", image ? "given" : "absent",
        c.image_dim ? std::to_string(*c.image_dim) : "null");
  Embedded out{embed_text(s, c, text), {}};
  if (!image) return out;
  check(image.rank() == 3 && image.dim(0) == text.dim(0) && image.dim(2) == *c.image_dim &&
            image.dim(1) == c.pos_embed_seq_len.value_or(image.dim(1)),
        Code::invalid_graph, "wan_transformer: image is {}, expected [{}, {}, {}]", to_string(image.shape()),
        text.dim(0), c.pos_embed_seq_len ? std::to_string(*c.pos_embed_seq_len) : "N", *c.image_dim);
  out.image = embed_image(s, c, image);
  if (c.added_kv_proj_dim) return out;
  return {concatenate({out.image, out.text}, 1), {}};
}

// ---- blocks

Tensor project(const Scope& s, const Config& c, Tensor x, const std::string& in_axis = axis::kEmbed) {
  return shard(linear(s, x, c.width(), in_axis, axis::kHeads), {axis::kBatch, axis::kLength, axis::kHeadsAct});
}
Tensor norm_over_heads(const Scope& s, const Config& c, Tensor x) {
  return nn::rms_norm(wide(s), x, c.eps, axis::kNorm);
}
Tensor in_heads(const Config& c, Tensor x) {
  return reshape(x, {x.dim(0), x.dim(1), c.num_attention_heads, c.attention_head_dim});
}

/// [B, S, N, d] → [B, S, D].
Tensor heads_together(Tensor y) {
  return shard(reshape(y, {y.dim(0), y.dim(1), y.dim(2) * y.dim(3)}), {axis::kBatch, axis::kLength, axis::kHeadsAct});
}

Tensor attention_out(const Scope& s, const Config& c, Tensor y) {
  y = linear(s / "to_out.0", y, c.width(), axis::kHeads, axis::kEmbed);
  return nn::dropout(s / "to_out.1", y);
}

Tensor self_attention(const Scope& s, const Config& c, Tensor x, const nn::Rotary& positions) {
  auto path = s.path_scope();
  Tensor q = named(norm_over_heads(s / "norm_q", c, project(s / "to_q", c, x)), value::kQueryProj);
  Tensor k = named(norm_over_heads(s / "norm_k", c, project(s / "to_k", c, x)), value::kKeyProj);
  Tensor v = named(project(s / "to_v", c, x), value::kValueProj);
  Tensor y =
      nn::self_attend(s, nn::rotated(in_heads(c, q), positions), nn::rotated(in_heads(c, k), positions), in_heads(c, v),
                      nn::attention_options(s, {.batch = axis::kBatch,
                                                .length = axis::kSelfLength,
                                                .kv_length = axis::kSelfKvLength,
                                                .heads = axis::kSelfHeads,
                                                .head_dim = axis::kKv}));
  return attention_out(s, c, heads_together(y));
}

/// `s`: the block's cross attention.
BlockContext block_context(const Scope& s, const Config& c, const Embedded& from) {
  auto path = s.path_scope();
  Tensor k = norm_over_heads(s / "norm_k", c, project(s / "to_k", c, from.text)), v = project(s / "to_v", c, from.text);
  if (!from.image) return {named(k, value::kKeyProj), named(v, value::kValueProj)};
  Tensor image = norm_over_heads(s / "norm_added_k", c, project(s / "add_k_proj", c, from.image, ""));
  return {named(k, value::kKeyProjText), named(v, value::kValueProjText), named(image, value::kKeyProjImg),
          named(project(s / "add_v_proj", c, from.image, ""), value::kValueProjImg)};
}

Tensor cross_attention(const Scope& s, const Config& c, Tensor x, const BlockContext& context) {
  auto path = s.path_scope();
  Tensor q = in_heads(c, named(norm_over_heads(s / "norm_q", c, project(s / "to_q", c, x)), value::kQueryProj));
  const AttentionOptions how = nn::attention_options(s, {.batch = axis::kBatch,
                                                         .length = axis::kCrossLength,
                                                         .kv_length = axis::kCrossKvLength,
                                                         .heads = axis::kCrossHeads,
                                                         .head_dim = axis::kKv});
  Tensor y;
  for (size_t i = 0; i < context.size(); i += 2) {
    Tensor of_one = heads_together(nn::cross_attend(q, in_heads(c, context[i]), in_heads(c, context[i + 1]), how));
    y = y ? y + of_one : of_one;
  }
  return attention_out(s, c, y);
}

/// Row `i` of a table of modulations [.., n, D] → [.., D].
Tensor row(Tensor table, int64_t i) { return squeeze(slice_axis(table, -2, i, i + 1), -2); }

/// LN(x) · (1 + scale) + shift, f32.   shift, scale: f32 [B, T, D].
Tensor modulated(const Scope& s, const Config& c, Tensor x, Tensor shift, Tensor scale) {
  return nn::layer_norm(s, f32(x), c.eps, false) * (scale + 1) + shift;
}

/// x: [B, S, D]   modulation: [B, T, 6, D] f32.
Tensor wan_block(const Scope& s, const Config& c, Tensor x, Tensor modulation, const nn::Rotary& positions,
                 const std::function<BlockContext(const Scope&)>& context) {
  auto path = s.path_scope();
  const double width = static_cast<double>(c.width());
  Tensor table = wide(s).param("scale_shift_table", {1, 6, c.width()}, {}, init::normal(1 / std::sqrt(width)));
  Tensor e = modulation + table;
  auto gated = [](Tensor to, Tensor y, Tensor gate) { return cast(f32(to) + f32(y) * gate, to.dtype()); };
  x = shard(x, {axis::kBatch, axis::kLength, axis::kHeadsAct});

  Tensor n = cast(modulated(s / "norm1", c, x, row(e, 0), row(e, 1)), x.dtype());
  x = gated(x, self_attention(s / "attn1", c, n, positions), row(e, 2));
  n = c.cross_attn_norm ? nn::layer_norm(wide(s) / "norm2", x, c.eps) : x;
  x = x + cross_attention(s / "attn2", c, n, context(s / "attn2"));
  n = cast(modulated(s / "norm3", c, x, row(e, 3), row(e, 4)), x.dtype());
  return gated(x, mlp(s / "ffn", n, {"net.0.proj", "net.2", "gelu_tanh", c.ffn_dim, c.width(), "net.1"}), row(e, 5));
}

/// x: [B, S, D], the tokens before the first block.
Tensor wan_blocks(const Scope& s, const Config& c, Tensor x, Tensor modulation, const Dims& grid, const WanInputs& in) {
  using Streams = BlockSequence::Streams;
  if (in.reuse && in.reuse->replaces_blocks()) return run_blocks(s, {.start = {x}}, in.reuse);
  const nn::Rotary positions = rotary(s.graph(), c, grid);
  Embedded embedded;
  std::vector<Tensor> stacked;
  if (in.context) {
    stacked = {in.context->text_keys, in.context->text_values};
    if (in.context->image_keys) stacked.insert(stacked.end(), {in.context->image_keys, in.context->image_values});
    check(stacked.size() == (c.added_kv_proj_dim ? 4U : 2U), Code::invalid_graph,
          "wan_transformer: the context is of a config {} added_kv_proj_dim", c.added_kv_proj_dim ? "without" : "with");
  } else {
    embedded = embed_context(s, c, in.text, in.image);
  }
  const auto block = [&](const Scope& b, Tensor y, const BlockContext& rows) {
    return wan_block(b, c, y, modulation, positions,
                     [&](const Scope& attn) { return in.context ? rows : block_context(attn, c, embedded); });
  };
  return run_blocks(
      s,
      {.start = {x},
       .first =
           [&](const Scope& root, const Streams& xs) {
             BlockContext rows;
             for (Tensor t : stacked) rows.push_back(squeeze(slice_axis(t, 0, 0, 1), 0));
             return Streams{block(root / "blocks" / 0, xs[0], rows)};
           },
       .rest = [&](const Scope& root, const Streams& xs,
                   int64_t from) { return nn::repeat(root / "blocks", c.num_layers, xs[0], stacked, block, from); },
       .input = [&](const Scope&, const Streams&) { return modulation; }},
      in.reuse);
}

/// [B, S, D] → [B, S, out_channels · patch], f32.
Tensor project_out(const Scope& s, const Config& c, Tensor x, Tensor time) {
  const double width = static_cast<double>(c.width());
  Tensor table = wide(s).param("scale_shift_table", {1, 2, c.width()}, {}, init::normal(1 / std::sqrt(width)));
  Tensor y = modulated(s / "norm_out", c, x, time + row(table, 0), time + row(table, 1));
  const int64_t patch = c.patch_size[0] * c.patch_size[1] * c.patch_size[2];
  return linear(s / "proj_out", y, c.out_channels * patch, axis::kEmbed, "");
}

}  // namespace

WanTransformerConfig WanTransformerConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "WanTransformer3DModel config");
  WanTransformerConfig c;
  c.patch_size = r.get("patch_size", c.patch_size);
  c.num_attention_heads = r.get("num_attention_heads", c.num_attention_heads);
  c.attention_head_dim = r.get("attention_head_dim", c.attention_head_dim);
  c.in_channels = r.get("in_channels", c.in_channels);
  const bool as_in = config.contains("out_channels") && config["out_channels"].is_null();
  c.out_channels = r.get("out_channels", as_in ? c.in_channels : c.out_channels);
  c.text_dim = r.get("text_dim", c.text_dim);
  c.freq_dim = r.get("freq_dim", c.freq_dim);
  c.ffn_dim = r.get("ffn_dim", c.ffn_dim);
  c.num_layers = r.get("num_layers", c.num_layers);
  c.cross_attn_norm = r.get("cross_attn_norm", c.cross_attn_norm);
  r.neutral("qk_norm", {"rms_norm_across_heads"});
  c.eps = r.get("eps", c.eps);
  c.image_dim = r.get_optional<int64_t>("image_dim");
  c.added_kv_proj_dim = r.get_optional<int64_t>("added_kv_proj_dim");
  c.rope_max_seq_len = r.get("rope_max_seq_len", c.rope_max_seq_len);
  c.pos_embed_seq_len = r.get_optional<int64_t>("pos_embed_seq_len");
  r.finish();

  auto positive = [&](const char* key, int64_t v) { r.positive({{key, v}}); };
  check(c.patch_size.size() == 3, Code::invalid_config, "{}: 'patch_size' has {} entries, expected 3", r.what(),
        c.patch_size.size());
  for (int64_t v : c.patch_size) positive("patch_size", v);
  positive("num_attention_heads", c.num_attention_heads);
  positive("attention_head_dim", c.attention_head_dim);
  check(c.attention_head_dim % 2 == 0, Code::invalid_config, "{}: 'attention_head_dim' is {}, expected an even number",
        r.what(), c.attention_head_dim);
  positive("in_channels", c.in_channels);
  positive("out_channels", c.out_channels);
  positive("text_dim", c.text_dim);
  check(c.freq_dim > 1, Code::invalid_config, "{}: 'freq_dim' is {}, expected at least 2", r.what(), c.freq_dim);
  positive("ffn_dim", c.ffn_dim);
  positive("num_layers", c.num_layers);
  check(c.eps >= 0, Code::invalid_config, "{}: 'eps' is {}, expected a number that is not negative", r.what(), c.eps);
  positive("rope_max_seq_len", c.rope_max_seq_len);
  if (c.image_dim) positive("image_dim", *c.image_dim);
  if (c.pos_embed_seq_len) positive("pos_embed_seq_len", *c.pos_embed_seq_len);
  check(c.image_dim || !c.added_kv_proj_dim, Code::invalid_config, "{}: 'added_kv_proj_dim' needs 'image_dim'",
        r.what());
  check(c.image_dim || !c.pos_embed_seq_len, Code::invalid_config, "{}: 'pos_embed_seq_len' needs 'image_dim'",
        r.what());
  check(!c.added_kv_proj_dim || *c.added_kv_proj_dim == c.width(), Code::invalid_config,
        "{}: 'added_kv_proj_dim' is {}, expected 'num_attention_heads' · 'attention_head_dim' = {}", r.what(),
        c.added_kv_proj_dim.value_or(0), c.width());
  return c;
}

Tensor wan_transformer(const Scope& s, const WanTransformerConfig& c, const WanInputs& in) {
  auto path = s.path_scope();
  Tensor x = in.sample, t = in.timestep;
  const Dims& p = c.patch_size;
  check(x && x.rank() == 5 && x.dim(4) == c.in_channels && x.dim(1) % p[0] == 0 && x.dim(2) % p[1] == 0 &&
            x.dim(3) % p[2] == 0,
        Code::invalid_graph,
        "wan_transformer: sample is {}, expected [B, F, H, W, {}] with F, H and W multiples of {}, {} and {}",
        x ? to_string(x.shape()) : "absent", c.in_channels, p[0], p[1], p[2]);
  const Dims grid = grid_of(c, x);
  for (int64_t n : grid)
    check(n <= c.rope_max_seq_len, Code::invalid_graph,
          "wan_transformer: sample {} makes {} tokens along one axis, rope_max_seq_len of this config is {}",
          to_string(x.shape()), n, c.rope_max_seq_len);
  const int64_t batch = x.dim(0), tokens = grid[0] * grid[1] * grid[2];
  check(t && (t.dims() == Dims{batch} || t.dims() == Dims{batch, tokens}), Code::invalid_graph,
        "wan_transformer: timestep is {}, expected [{}] or, one for each token, [{}, {}]",
        t ? to_string(t.shape()) : "absent", batch, batch, tokens);

  const Time time = embed_time(s, c, t, !in.reuse || !in.reuse->replaces_blocks());
  Tensor start = embed_patches(s / "patch_embedding", c, cast(x, s.dtype()));
  start = shard(start, {axis::kBatch, axis::kLength, axis::kHeadsAct});
  Tensor end = wan_blocks(s, c, start, time.modulation, grid, in);
  return join_patches(c, project_out(s, c, end, time.embedding), grid);
}

WanContext wan_context(const Scope& s, const WanTransformerConfig& c, Tensor text, Tensor image) {
  auto path = s.path_scope();
  const Embedded from = embed_context(s, c, text, image);
  const std::vector<Tensor> all = nn::per_layer(
      s / "blocks", c.num_layers, [&](const Scope& block) { return block_context(block / "attn2", c, from); });
  WanContext out{all[0], all[1]};
  if (from.image) out.image_keys = all[2], out.image_values = all[3];
  return out;
}

void trace_wan_transformer(const Scope& s, const WanTransformerConfig& c) {
  auto zeros = [&](Dims dims) { return full(s.graph(), 0, {DType::f32, std::move(dims)}); };
  const Dims& p = c.patch_size;
  WanInputs in{
      .sample = zeros({1, p[0], p[1], p[2], c.in_channels}), .timestep = zeros({1}), .text = zeros({1, 1, c.text_dim})};
  if (c.image_dim) in.image = zeros({1, c.pos_embed_seq_len.value_or(1), *c.image_dim});
  wan_transformer(s, c, in);
}

}  // namespace md
