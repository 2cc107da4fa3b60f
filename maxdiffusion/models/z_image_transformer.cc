#include "maxdiffusion/models/z_image_transformer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/round_up.h"
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

using Config = ZImageTransformerConfig;
constexpr double kHeadEps = 1e-5, kFinalEps = 1e-6;
constexpr int64_t kSinusoids = 256, kTimeHidden = 1024, kMaxConditions = 256;

Tensor f32(Tensor x) { return cast(x, DType::f32); }
int64_t filled_up(int64_t n) { return round_up(n, kZImageTokens); }

Tensor linear(const Scope& s, Tensor x, int64_t out, bool bias, const std::string& in_axis,
              const std::string& out_axis) {
  return nn::linear(s, x, {.out = out, .bias = bias, .in_axis = in_axis, .out_axis = out_axis});
}
/// The hidden states of a stream between blocks: [B, L, D].
Tensor stream(Tensor x) { return shard(x, {axis::kBatch, axis::kLength, axis::kHeadsAct}); }

/// Embedding of the timestep, input of the blocks' modulation: [B, min(dim, 256)].
Tensor embed_time(const Scope& root, const Config& c, Tensor time) {
  ScopeOptions o = root.options();
  o.activations = DType::f32;
  const Scope s = root.with(o) / "t_embedder";
  auto path = s.path_scope();
  Tensor h = nn::timestep_embedding(f32(time) * c.t_scale, kSinusoids, true, 0);
  h = silu(linear(s / "mlp.0", h, kTimeHidden, true, axis::kEmbed, axis::kMlp));
  return cast(linear(s / "mlp.2", h, std::min(c.dim, kMaxConditions), true, axis::kMlp, axis::kEmbed), root.dtype());
}

// ---- blocks

/// Positions of a stream's tokens, and the number that a block attends to.
struct Places {
  nn::Rotary rotary;
  Tensor lengths = {};  // s32 [B]; absent: all
};

Tensor attend(const Scope& s, const Config& c, Tensor x, const Places& places) {
  auto path = s.path_scope();
  auto project = [&](const char* name, const char* value) {
    Tensor y = stream(linear(s / name, x, c.dim, false, axis::kEmbed, axis::kHeads));
    return reshape(named(y, value), {x.dim(0), x.dim(1), c.n_heads, c.head_dim()});
  };
  auto turned = [&](const char* norm, Tensor y) {
    return nn::rotated(c.qk_norm ? nn::rms_norm(s / norm, y, kHeadEps) : y, places.rotary);
  };
  Tensor q = turned("norm_q", project("to_q", value::kQueryProj)),
         k = turned("norm_k", project("to_k", value::kKeyProj)), v = project("to_v", value::kValueProj);
  AttentionOptions how = nn::attention_options(s, {.batch = axis::kBatch,
                                                   .length = axis::kLength,
                                                   .kv_length = axis::kKvLength,
                                                   .heads = axis::kHeadsAct,
                                                   .head_dim = axis::kKv});
  how.lengths = places.lengths;
  Tensor y = stream(reshape(nn::self_attend(q, k, v, how), x.dims()));
  return linear(s / "to_out.0", y, c.dim, false, axis::kHeads, axis::kEmbed);
}

/// w2(silu(w1·x) · w3·x).
Tensor feed_forward(const Scope& s, const Config& c, Tensor x) {
  auto path = s.path_scope();
  const auto hidden = static_cast<int64_t>(static_cast<double>(c.dim) / 3 * 8);
  auto into = [&](const char* name) {
    return shard(linear(s / name, x, hidden, false, axis::kEmbed, axis::kMlp),
                 {axis::kBatch, axis::kLength, axis::kMlp});
  };
  Tensor h = named(silu(into("w1")) * into("w3"), value::kFfnActivation);
  return linear(s / "w2", h, c.dim, false, axis::kMlp, axis::kEmbed);
}

/// Scale and gate of attention, then of the feed-forward network; each [B, 1, D], f32.
std::vector<Tensor> modulations(const Scope& s, const Config& c, Tensor conditions) {
  Tensor all = linear(s / "adaLN_modulation.0", conditions, 4 * c.dim, true, axis::kEmbed, axis::kMlp);
  return split(expand_dims(shard(f32(all), {axis::kBatch, ""}), 1), 4, 2);
}

/// Tokens as the attention of a block with modulation gets them.
Tensor block_input(const Scope& s, const Config& c, Tensor x, Tensor conditions) {
  return f32(nn::rms_norm(s / "attention_norm1", stream(x), c.norm_eps)) * (modulations(s, c, conditions)[0] + 1);
}

/// `conditions`: timestep embedding; absent: a block without modulation.
Tensor block(const Scope& s, const Config& c, Tensor x, Tensor conditions, const Places& places) {
  auto path = s.path_scope();
  x = stream(x);
  std::vector<Tensor> m;
  if (conditions) m = modulations(s, c, conditions);
  auto normed = [&](const char* name, Tensor y) { return f32(nn::rms_norm(s / name, y, c.norm_eps)); };
  auto part = [&](const char* before, const char* behind, size_t scale, const std::function<Tensor(Tensor)>& f) {
    Tensor in = normed(before, x);
    if (conditions) in = in * (m[scale] + 1);
    Tensor y = normed(behind, f(cast(in, x.dtype())));
    if (conditions) y = y * tanh(m[scale + 1]);
    x = stream(cast(f32(x) + y, x.dtype()));
  };
  part("attention_norm1", "attention_norm2", 0, [&](Tensor h) { return attend(s / "attention", c, h, places); });
  part("ffn_norm1", "ffn_norm2", 2, [&](Tensor h) { return feed_forward(s / "feed_forward", c, h); });
  return x;
}

Tensor blocks(const Scope& s, const Config& c, int64_t n, Tensor x, Tensor conditions, const Places& places,
              int64_t from = 0) {
  return nn::repeat(
      s, n, x, [&](const Scope& b, Tensor h) { return block(b, c, h, conditions, places); }, from);
}

// ---- tokens and their places

/// [B, h, w, C] → [B, h/2·w/2, 4C]: all channels of a token's first latent, then of the next.
Tensor patches(Tensor x) {
  constexpr int64_t p = Config::kPatch;
  const int64_t b = x.dim(0), rows = x.dim(1) / p, columns = x.dim(2) / p, c = x.dim(3);
  return reshape(transpose(reshape(x, {b, rows, p, columns, p, c}), {0, 1, 3, 2, 4, 5}),
                 {b, rows * columns, p * p * c});
}
/// The inverse of patches().
Tensor of_patches(Tensor x, int64_t rows, int64_t columns) {
  constexpr int64_t p = Config::kPatch;
  const int64_t b = x.dim(0), c = x.dim(2) / (p * p);
  return reshape(transpose(reshape(x, {b, rows, columns, p, p, c}), {0, 1, 3, 2, 4, 5}), {b, rows * p, columns * p, c});
}

/// x where `keep`, else a trained token. x: [B, L, D]   keep: pred [B, L].
Tensor or_learnt(const Scope& s, const char* name, Tensor keep, Tensor x) {
  Tensor learnt = cast(s.param(name, {1, x.dim(2)}, {"", ""}, init::normal(0.02)), x.dtype());
  return where(broadcast_to(expand_dims(keep, 2), x.dims()), x, broadcast_to(expand_dims(learnt, 0), x.dims()));
}

/// 0 … n − 1 in each row: s32 [B, n].
Tensor counted(Graph& g, int64_t batch, int64_t n) { return iota(g, {DType::s32, {batch, n}}, 1); }
Tensor per_position(Tensor lengths, int64_t n) { return broadcast_to(expand_dims(lengths, 1), {lengths.dim(0), n}); }

/// Positions of the image's tokens with padding, s32 [B, S, 3]: row and column, and on the text's axis the first
/// position after the padded text; padding tokens are at 0.
Tensor image_places(Tensor text_tokens, int64_t rows, int64_t columns) {
  Graph& g = text_tokens.graph();
  const int64_t n = rows * columns, all = filled_up(n), batch = text_tokens.dim(0);
  Tensor at = counted(g, batch, all), width = full(g, static_cast<double>(columns), at.shape());
  Tensor real = lt(at, full(g, static_cast<double>(n), at.shape())), none = zeros_like(at);
  auto of = [&](Tensor place) { return where(real, place, none); };
  return stack({of(per_position(text_tokens, all) + 1), of(at / width), of(rem(at, width))}, 2);
}

/// Positions of the text's tokens with padding: 1, 2, … on the first axis; s32 [B, L, 3].
Tensor text_places(Graph& g, int64_t batch, int64_t tokens) {
  Tensor at = counted(g, batch, tokens), none = zeros_like(at);
  return stack({at + 1, none, none}, 2);
}

void check_inputs(const Config& c, const ZImageInputs& in) {
  Tensor x = in.sample;
  auto shown = [](Tensor t) { return t ? to_string(t.shape()) : "absent"; };
  check(x && x.rank() == 4 && x.dim(3) == c.in_channels && x.dim(1) % Config::kPatch == 0 &&
            x.dim(2) % Config::kPatch == 0,
        Code::invalid_graph, "z_image_transformer: sample is {}, expected [B, h, w, {}] with even h and w", shown(x),
        c.in_channels);
  const int64_t batch = x.dim(0);
  check(in.time && in.time.dims() == Dims{batch}, Code::invalid_graph, "z_image_transformer: time is {}, expected [{}]",
        shown(in.time), batch);
  check(in.text && in.text.rank() == 3 && in.text.dim(0) == batch && in.text.dim(2) == c.cap_feat_dim &&
            in.text.dim(1) % kZImageTokens == 0,
        Code::invalid_graph, "z_image_transformer: text is {}, expected [{}, L, {}], L a multiple of {}",
        shown(in.text), batch, c.cap_feat_dim, kZImageTokens);
  check(in.lengths && in.lengths.shape() == Shape{DType::s32, {batch}}, Code::invalid_graph,
        "z_image_transformer: lengths are {}, expected s32 [{}]", shown(in.lengths), batch);
  const Dims most = {in.text.dim(1) + 2, x.dim(1) / Config::kPatch, x.dim(2) / Config::kPatch};
  const char* what[] = {"tokens of text", "rows of tokens", "columns of tokens"};
  for (size_t i = 0; i < most.size(); ++i)
    check(most[i] <= c.axes_lens[i], Code::invalid_config,
          "ZImageTransformer2DModel: {} {} need {} places, and 'axes_lens' of config.json has {}",
          most[i] - (i == 0 ? 2 : 0), what[i], most[i], c.axes_lens[i]);
}

}  // namespace

ZImageTransformerConfig ZImageTransformerConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "ZImageTransformer2DModel config");
  ZImageTransformerConfig c;
  for (const auto& [key, size] : {std::pair{"all_patch_size", kPatch}, {"all_f_patch_size", int64_t{1}}}) {
    const auto sizes = r.get(key, std::vector<int64_t>{size});
    check(sizes == std::vector<int64_t>{size}, Code::invalid_config, "{}: '{}' holds {} numbers, expected [{}]",
          r.what(), key, sizes.size(), size);
  }
  r.neutral("siglip_feat_dim");
  r.ignore({"n_kv_heads"});  // diffusers' layers have as many key-value heads as query heads
  c.in_channels = r.get("in_channels", c.in_channels);
  c.dim = r.get("dim", c.dim);
  c.n_layers = r.get("n_layers", c.n_layers);
  c.n_refiner_layers = r.get("n_refiner_layers", c.n_refiner_layers);
  c.n_heads = r.get("n_heads", c.n_heads);
  c.norm_eps = r.get("norm_eps", c.norm_eps);
  c.qk_norm = r.get("qk_norm", c.qk_norm);
  c.cap_feat_dim = r.get("cap_feat_dim", c.cap_feat_dim);
  c.rope_theta = r.get("rope_theta", c.rope_theta);
  c.t_scale = r.get("t_scale", c.t_scale);
  c.axes_dims = r.get("axes_dims", c.axes_dims);
  c.axes_lens = r.get("axes_lens", c.axes_lens);
  r.finish();

  r.positive({{"in_channels", c.in_channels},
              {"dim", c.dim},
              {"n_layers", c.n_layers},
              {"n_refiner_layers", c.n_refiner_layers},
              {"n_heads", c.n_heads},
              {"cap_feat_dim", c.cap_feat_dim}});
  check(c.dim % c.n_heads == 0, Code::invalid_config, "{}: 'dim' is {}, expected a multiple of 'n_heads' = {}",
        r.what(), c.dim, c.n_heads);
  for (const auto& [key, list] : {std::pair{"axes_dims", &c.axes_dims}, {"axes_lens", &c.axes_lens}})
    check(list->size() == 3, Code::invalid_config, "{}: '{}' has {} entries, expected 3", r.what(), key, list->size());
  for (int64_t v : c.axes_dims)
    check(v >= 0 && v % 2 == 0, Code::invalid_config, "{}: 'axes_dims' holds {}, expected even numbers", r.what(), v);
  const int64_t features = std::accumulate(c.axes_dims.begin(), c.axes_dims.end(), int64_t{0});
  check(features == c.head_dim(), Code::invalid_config,
        "{}: the sum of 'axes_dims' is {}, expected 'dim' / 'n_heads' = {}", r.what(), features, c.head_dim());
  return c;
}

Tensor z_image_transformer(const Scope& s, const Config& c, const ZImageInputs& in) {
  auto path = s.path_scope();
  check_inputs(c, in);
  Graph& g = s.graph();
  constexpr int64_t p = Config::kPatch;
  const int64_t batch = in.sample.dim(0), rows = in.sample.dim(1) / p, columns = in.sample.dim(2) / p,
                image_tokens = rows * columns, image_length = filled_up(image_tokens), text_length = in.text.dim(1);
  Tensor lengths = maximum(in.lengths, scalar_like(in.lengths, 1));
  // Number of tokens of each text including padding.
  Tensor text_tokens = lengths + (kZImageTokens - 1);
  text_tokens = text_tokens - rem(text_tokens, scalar_like(text_tokens, kZImageTokens));
  const Dims limits = {text_length + 2, rows, columns};
  Tensor of_image = image_places(text_tokens, rows, columns), of_text = text_places(g, batch, text_length);
  auto rotary = [&](Tensor places) { return nn::rotary_at(places, limits, c.axes_dims, c.rope_theta); };

  Tensor conditions = embed_time(s, c, in.time);
  Tensor image = linear(s / "all_x_embedder.2-1", cast(patches(in.sample), s.dtype()), c.dim, true, "", axis::kEmbed);
  const Shape of_all{DType::s32, {batch, image_length}};
  image = or_learnt(s, "x_pad_token",
                    lt(counted(g, batch, image_length), full(g, static_cast<double>(image_tokens), of_all)),
                    pad_end(image, 1, image_length));
  image = blocks(s / "noise_refiner", c, c.n_refiner_layers, image, conditions, {rotary(of_image)});

  Tensor text = nn::rms_norm(s / "cap_embedder.0", cast(in.text, s.dtype()), c.norm_eps);
  text = linear(s / "cap_embedder.1", text, c.dim, true, "", axis::kEmbed);
  text = or_learnt(s, "cap_pad_token", lt(counted(g, batch, text_length), per_position(lengths, text_length)), text);
  text = blocks(s / "context_refiner", c, c.n_refiner_layers, text, {}, {rotary(of_text), text_tokens});

  const Places places{rotary(concatenate({of_image, of_text}, 1)), text_tokens + image_length};
  const int64_t length = image_length + text_length;
  using Streams = BlockSequence::Streams;
  Tensor x = run_blocks(
      s,
      {.start = {concatenate({image, text}, 1)},
       .first = [&](const Scope& root,
                    const Streams& xs) { return Streams{block(root / "layers" / 0, c, xs[0], conditions, places)}; },
       .rest = [&](const Scope& root, const Streams& xs,
                   int64_t from) { return blocks(root / "layers", c, c.n_layers, xs[0], conditions, places, from); },
       .input = [&](const Scope& root,
                    const Streams& xs) { return block_input(root / "layers" / 0, c, xs[0], conditions); },
       .counts = expand_dims(cast(lt(counted(g, batch, length), per_position(places.lengths, length)), DType::f32), 2)},
      in.reuse);

  const Scope last = s / "all_final_layer.2-1";
  Tensor scale = f32(linear(last / "adaLN_modulation.1", silu(conditions), c.dim, true, axis::kEmbed, axis::kMlp));
  x = nn::layer_norm(last, f32(slice_axis(x, 1, 0, image_tokens)), kFinalEps, false) * (expand_dims(scale, 1) + 1);
  return of_patches(linear(last / "linear", x, p * p * c.in_channels, true, axis::kEmbed, ""), rows, columns);
}

void trace_z_image_transformer(const Scope& s, const Config& c) {
  Graph& g = s.graph();
  z_image_transformer(s, c,
                      {.sample = full(g, 0, {DType::f32, {1, Config::kPatch, Config::kPatch, c.in_channels}}),
                       .time = full(g, 0, {DType::f32, {1}}),
                       .text = full(g, 0, {DType::f32, {1, kZImageTokens, c.cap_feat_dim}}),
                       .lengths = full(g, 1, {DType::s32, {1}})});
}

}  // namespace md
