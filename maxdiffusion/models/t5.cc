#include "maxdiffusion/models/t5.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <optional>
#include <vector>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

constexpr double kMasked = -1e30;  // a logit whose weight is exactly 0

/// Bias of a layer's attention logits.
using BiasOf = std::function<Tensor(const Scope& attention)>;

Init spread(int64_t fan) { return init::normal(std::pow(static_cast<double>(fan), -0.5)); }

/// The bucket of every pair of query and key: s32 [L, L].
Tensor buckets_of_pairs(Graph& g, int64_t length, const T5Config& c) {
  HostArray of_distance(Shape{DType::s32, {2 * length - 1}});  // from distance 1 − L to L − 1
  auto v = of_distance.mutable_view<int32_t>();
  for (int64_t i = 0; i < 2 * length - 1; ++i)
    v[static_cast<size_t>(i)] = static_cast<int32_t>(relative_position_bucket(
        i - (length - 1), c.relative_attention_num_buckets, c.relative_attention_max_distance));
  const Shape pairs{DType::s32, {length, length}};
  return take(constant(g, of_distance), iota(g, pairs, 1) - iota(g, pairs, 0) + static_cast<double>(length - 1));
}

/// Bias by relative positions, from the table of an attention layer: f32 [1, heads, L, L].   buckets: s32 [L, L].
Tensor position_bias(const Scope& attention, const T5Config& c, Tensor buckets) {
  auto path = attention.path_scope();
  Tensor table = (attention / "relative_attention_bias")
                     .param("weight", {c.relative_attention_num_buckets, c.num_heads}, {"", ""}, spread(c.d_model));
  return expand_dims(transpose(take(cast(table, DType::f32), buckets), {2, 0, 1}), 0);
}

/// x: [B, L, d_model]   bias: computes the bias of the logits, broadcast to [B, heads, L, L].
Tensor self_attention(const Scope& s, Tensor x, const T5Config& c, const BiasOf& bias) {
  auto path = s.path_scope();
  const int64_t inner = c.num_heads * c.d_kv;
  auto constrain = [](Tensor t) { return shard(t, {axis::kBatch, axis::kLength, axis::kHeadsAct}); };
  auto project = [&](const char* layer, int64_t fan, const char* name) {
    Tensor y = nn::linear(
        s / layer, x,
        {.out = inner, .bias = false, .in_axis = axis::kEmbed, .out_axis = axis::kHeads, .init = spread(fan)});
    return reshape(named(constrain(y), name), {x.dim(0), x.dim(1), c.num_heads, c.d_kv});
  };
  Tensor q = project("q", c.d_model * c.d_kv, value::kQueryProj), k = project("k", c.d_model, value::kKeyProj),
         v = project("v", c.d_model, value::kValueProj);
  AttentionOptions options = nn::attention_options(s, {.batch = axis::kBatch,
                                                       .length = axis::kLength,
                                                       .kv_length = axis::kKvLength,
                                                       .heads = axis::kHeadsAct,
                                                       .head_dim = axis::kKv});
  options.scale = 1;
  options.bias = bias(s);
  Tensor y = nn::self_attend(q, k, v, options);
  return nn::linear(
      s / "o", constrain(reshape(y, {x.dim(0), x.dim(1), inner})),
      {.out = c.d_model, .bias = false, .in_axis = axis::kHeads, .out_axis = axis::kEmbed, .init = spread(inner)});
}

/// Gated: wo(act(wi_0·x) · wi_1·x); else wo(act(wi·x)).   f32 [B, L, d_model].
Tensor feed_forward(const Scope& s, Tensor x, const T5Config& c) {
  auto path = s.path_scope();
  auto into = [&](const char* name) {
    return nn::linear(
        s / name, x,
        {.out = c.d_ff, .bias = false, .in_axis = axis::kEmbed, .out_axis = axis::kMlp, .init = spread(c.d_model)});
  };
  Tensor h = nn::activation(c.dense_act_fn, into(c.is_gated_act ? "wi_0" : "wi"));
  if (c.is_gated_act) h = h * into("wi_1");
  h = named(h, value::kFfnActivation);
  return nn::linear(
      s / "wo", cast(h, DType::f32),
      {.out = c.d_model, .bias = false, .in_axis = axis::kMlp, .out_axis = axis::kEmbed, .init = spread(c.d_ff)});
}

/// x: f32 [B, L, d_model].
Tensor block(const Scope& s, Tensor x, const T5Config& c, const BiasOf& bias) {
  auto path = s.path_scope();
  auto normed = [&](const Scope& layer) {
    return cast(nn::rms_norm(layer / "layer_norm", x, c.layer_norm_epsilon), s.dtype());
  };
  const Scope attention = s / "layer.0", feed = s / "layer.1";
  x = x + cast(self_attention(attention / "SelfAttention", normed(attention), c, bias), DType::f32);
  return x + feed_forward(feed / "DenseReluDense", normed(feed), c);
}

}  // namespace

int64_t relative_position_bucket(int64_t distance, int64_t buckets, int64_t max_distance) {
  const int64_t half = buckets / 2, exact = half / 2, r = std::abs(distance), first = distance > 0 ? half : 0;
  if (r < exact) return first + r;
  // In f32, as in the training of the published weights: rounding decides the bucket of distances at a bucket's edge.
  const auto near = static_cast<float>(exact);
  const float part = std::log(static_cast<float>(r) / near) /
                     static_cast<float>(std::log(static_cast<double>(max_distance) / static_cast<double>(exact)));
  return first + std::min(half - 1, exact + static_cast<int64_t>(part * static_cast<float>(half - exact)));
}

namespace {

/// Whether the config is of T5 (true) or of UMT5.
bool is_t5(ConfigReader& r) {
  std::vector<std::string> names = r.get<std::vector<std::string>>("architectures", {});
  if (const auto type = r.get_optional<std::string>("model_type")) names.push_back(*type);
  std::optional<bool> found;
  for (const std::string& name : names) {
    const bool t5 = name == "t5" || name == "T5EncoderModel" || name == "T5ForConditionalGeneration" ||
                    name == "T5Model",
               umt5 = name == "umt5" || name == "UMT5EncoderModel" || name == "UMT5ForConditionalGeneration" ||
                      name == "UMT5Model";
    check(t5 || umt5, Code::invalid_config,
          "{}: 'architectures' or 'model_type' is '{}'; expected T5EncoderModel (t5) or UMT5EncoderModel (umt5)",
          r.what(), name);
    check(found.value_or(t5) == t5, Code::invalid_config, "{}: 'architectures' and 'model_type' name different models",
          r.what());
    found = t5;
  }
  check(found.has_value(), Code::invalid_config,
        "{}: 'architectures' and 'model_type' are missing; expected T5EncoderModel (t5) or "
        "UMT5EncoderModel (umt5)",
        r.what());
  return *found;
}

}  // namespace

T5Config T5Config::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "T5 encoder config");
  T5Config c;
  c.shared_positions = is_t5(r);
  if (c.shared_positions) c.vocab_size = 32128, c.d_ff = 2048, c.num_layers = 6, c.num_heads = 8;
  r.neutral("is_decoder", {false});
  c.vocab_size = r.get("vocab_size", c.vocab_size);
  c.d_model = r.get("d_model", c.d_model);
  c.d_kv = r.get("d_kv", c.d_kv);
  c.d_ff = r.get("d_ff", c.d_ff);
  c.num_layers = r.get("num_layers", c.num_layers);
  c.num_heads = r.get("num_heads", c.num_heads);
  c.relative_attention_num_buckets = r.get("relative_attention_num_buckets", c.relative_attention_num_buckets);
  c.relative_attention_max_distance = r.get("relative_attention_max_distance", c.relative_attention_max_distance);
  c.layer_norm_epsilon = r.get("layer_norm_epsilon", c.layer_norm_epsilon);
  r.positive({{"d_model", c.d_model}, {"d_kv", c.d_kv}, {"d_ff", c.d_ff}, {"num_heads", c.num_heads}});
  // "relu", "gated-silu": the activation, and whether a second projection gates it. "gated-gelu" is the approximation.
  const auto feed_forward = r.get<std::string>("feed_forward_proj", c.shared_positions ? "relu" : "gated-gelu");
  c.is_gated_act = feed_forward.starts_with("gated-");
  c.dense_act_fn = c.is_gated_act ? feed_forward.substr(std::string("gated-").size()) : feed_forward;
  if (feed_forward == "gated-gelu") c.dense_act_fn = "gelu_new";
  c.is_gated_act = r.get("is_gated_act", c.is_gated_act);
  c.dense_act_fn = r.get("dense_act_fn", c.dense_act_fn);
  check(
      c.relative_attention_num_buckets >= 4 && c.relative_attention_max_distance > c.relative_attention_num_buckets / 4,
      Code::invalid_config,
      "{}: 'relative_attention_num_buckets' is {} and 'relative_attention_max_distance' {}; expected at least 4, and "
      "more than a quarter of it",
      r.what(), c.relative_attention_num_buckets, c.relative_attention_max_distance);
  return c;
}

Tensor t5_encoder(const Scope& s, const T5Config& c, Tensor ids, Tensor mask) {
  auto path = s.path_scope();
  check(ids.rank() == 2 && is_integer(ids.dtype()) && (!mask || mask.dims() == ids.dims()), Code::invalid_graph,
        "t5_encoder: ids are {} and the mask is {}; expected integers [B, L] and the same sizes",
        to_string(ids.shape()), mask ? to_string(mask.shape()) : "absent");
  const int64_t batch = ids.dim(0), length = ids.dim(1);
  Tensor embedding =
      (s / "shared").param("weight", {c.vocab_size, c.d_model}, {axis::kVocab, axis::kEmbed}, init::normal(1));
  Tensor x = cast(take(embedding, ids), DType::f32);
  Tensor buckets = buckets_of_pairs(s.graph(), length, c), masked;
  if (mask) {
    const Shape keys{DType::f32, {batch, length}};
    masked = where(ne(mask, zeros_like(mask)), full(s.graph(), 0, keys), full(s.graph(), kMasked, keys));
    masked = reshape(masked, {batch, 1, 1, length});
  }
  auto with_mask = [&](Tensor bias) { return masked ? bias + masked : bias; };
  BiasOf bias = [&](const Scope& attention) { return with_mask(position_bias(attention, c, buckets)); };
  if (c.shared_positions) {
    Tensor of_all = bias(s / "encoder.block.0.layer.0.SelfAttention");
    bias = [of_all](const Scope&) { return of_all; };
  }
  x = nn::repeat(s / "encoder.block", c.num_layers, x, [&](const Scope& b, Tensor h) { return block(b, h, c, bias); });
  return nn::rms_norm(s / "encoder.final_layer_norm", x, c.layer_norm_epsilon);
}

void trace_t5_encoder(const Scope& s, const T5Config& c) { t5_encoder(s, c, full(s.graph(), 0, {DType::s32, {1, 1}})); }

WeightNameMap llama_t5_names(const T5Config&) {
  static const std::vector<std::pair<std::string, std::string>> rows = {
      {"shared.", "token_embd."},
      {"encoder.final_layer_norm.", "enc.output_norm."},
      {"encoder.block.", "enc.blk."},
      {".layer.0.SelfAttention.relative_attention_bias.", ".attn_rel_b."},
      {".layer.0.SelfAttention.q.", ".attn_q."},
      {".layer.0.SelfAttention.k.", ".attn_k."},
      {".layer.0.SelfAttention.v.", ".attn_v."},
      {".layer.0.SelfAttention.o.", ".attn_o."},
      {".layer.0.layer_norm.", ".attn_norm."},
      {".layer.1.DenseReluDense.wi_0.", ".ffn_gate."},
      {".layer.1.DenseReluDense.wi_1.", ".ffn_up."},
      {".layer.1.DenseReluDense.wi.", ".ffn_up."},
      {".layer.1.DenseReluDense.wo.", ".ffn_down."},
      {".layer.1.layer_norm.", ".ffn_norm."}};
  return {.aliases =
              [](std::string name) {
                std::vector<WeightAlias> names;
                for (const char* encoder : {"t5xxl", "umt5xxl"})
                  names.push_back({.prefix = of_text_encoder(encoder), .name = name});
                for (const auto& [ours, theirs] : rows)
                  if (const size_t at = name.find(ours); at != std::string::npos) name.replace(at, ours.size(), theirs);
                names.insert(names.begin(), {.name = name});
                return names;
              },
          .unneeded = {"dec.", "output."},
          .architecture = "t5encoder"};
}

}  // namespace md
