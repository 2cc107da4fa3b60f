#include "maxdiffusion/nn/attention.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
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

Tensor multi_head_attention(const Scope& s, Tensor x, Tensor context, const MultiHeadOptions& o) {
  auto path = s.path_scope();
  const int64_t width = x.dim(-1);
  check(o.heads > 0 && width % o.heads == 0, Code::invalid_config,
        "attention: {} channels do not divide into {} heads, at {}", width, o.heads, s.path());
  auto constrain = [&](Tensor t) { return o.annotated ? shard(t, {axis::kBatch, axis::kLength, axis::kHeadsAct}) : t; };
  const std::string embed = o.annotated ? axis::kEmbed : "", heads = o.annotated ? axis::kHeads : "";
  auto project = [&](const char* name, Tensor from) {
    Tensor y =
        constrain(linear(s / name, from, {.out = width, .bias = o.qkv_bias, .in_axis = embed, .out_axis = heads}));
    return reshape(y, {y.dim(0), y.dim(1), o.heads, width / o.heads});
  };
  Tensor q = project("to_q", x), k = project("to_k", context), v = project("to_v", context);
  if (o.upcast) q = cast(q, DType::f32), k = cast(k, DType::f32), v = cast(v, DType::f32);
  const AttentionAxes axes = o.annotated ? AttentionAxes{.batch = axis::kBatch,
                                                         .length = axis::kLength,
                                                         .kv_length = axis::kKvLength,
                                                         .heads = axis::kHeadsAct,
                                                         .head_dim = axis::kKv}
                                         : AttentionAxes{};
  Tensor y = cast(attention(q, k, v, attention_options(s, axes)), x.dtype());
  y = constrain(reshape(y, x.dims()));
  return linear(s / "to_out.0", y, {.out = width, .in_axis = heads, .out_axis = embed});
}

}  // namespace md::nn
