#include "maxdiffusion/nn/attention.h"

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/nn/perturbation.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md::nn {

AttentionOptions attention_options(const Scope& s, AttentionAxes axes) {
  const ScopeOptions& o = s.options();
  return {.kernel = o.attention,
          .flash_min_seq_length = o.flash_min_seq_length,
          .blocks = o.attention_blocks,
          .precision = o.precision,
          .axes = std::move(axes)};
}

namespace {

Tensor local_attention(Tensor q, Tensor k, Tensor v, const AttentionOptions& o, const char* name) {
  return named(named(attention(named(q, value::kXqOut), named(k, value::kXkOut), v, o), name), value::kAttnOutput);
}

}  // namespace

Tensor self_attend(Tensor q, Tensor k, Tensor v, const AttentionOptions& o) {
  return local_attention(q, k, v, o, value::kSelfAttn);
}
Tensor self_attend(const Scope& s, Tensor q, Tensor k, Tensor v, const AttentionOptions& o) {
  const auto& p = s.options().perturbation;
  if (!p || !p->attentions.contains(s.path())) return self_attend(q, k, v, o);
  auto unchanged = [&](Tensor x) { return slice_axis(x, 0, 0, p->first); };
  Tensor y = self_attend(unchanged(q), unchanged(k), unchanged(v), o);
  return concatenate({y, cast(slice_axis(v, 0, p->first, v.dim(0)), y.dtype())}, 0);
}
Tensor cross_attend(Tensor q, Tensor k, Tensor v, const AttentionOptions& o) {
  return local_attention(q, k, v, o, value::kCrossAttn);
}

Tensor multi_head_attention(const Scope& s, Tensor x, Tensor context, const MultiHeadOptions& o) {
  auto path = s.path_scope();
  const int64_t width = x.dim(-1);
  check(o.heads > 0 && width % o.heads == 0, Code::invalid_config,
        "attention: {} channels do not divide into {} heads, at {}", width, o.heads, s.path());
  auto constrain = [&](Tensor t) { return o.annotated ? shard(t, {axis::kBatch, axis::kLength, axis::kHeadsAct}) : t; };
  const std::string embed = o.annotated ? axis::kEmbed : "", heads = o.annotated ? axis::kHeads : "";
  auto project = [&](const char* layer, Tensor from, const char* name) {
    Tensor y =
        constrain(linear(s / layer, from, {.out = width, .bias = o.qkv_bias, .in_axis = embed, .out_axis = heads}));
    return named(reshape(y, {y.dim(0), y.dim(1), o.heads, width / o.heads}), name);
  };
  Tensor q = project("to_q", x, value::kQueryProj), k = project("to_k", context, value::kKeyProj),
         v = project("to_v", context, value::kValueProj);
  if (o.upcast) q = cast(q, DType::f32), k = cast(k, DType::f32), v = cast(v, DType::f32);
  const AttentionAxes axes = o.annotated ? AttentionAxes{.batch = axis::kBatch,
                                                         .length = axis::kLength,
                                                         .kv_length = axis::kKvLength,
                                                         .heads = axis::kHeadsAct,
                                                         .head_dim = axis::kKv}
                                         : AttentionAxes{};
  AttentionOptions options = attention_options(s, axes);
  options.lengths = o.lengths;
  Tensor y = cast(x == context ? self_attend(s, q, k, v, options) : cross_attend(q, k, v, options), x.dtype());
  if (o.also) y = y + cast(o.also(q), y.dtype());
  y = constrain(reshape(y, x.dims()));
  return linear(s / "to_out.0", y, {.out = width, .in_axis = heads, .out_axis = embed});
}

}  // namespace md::nn
