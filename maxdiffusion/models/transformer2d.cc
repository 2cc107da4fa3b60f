#include "maxdiffusion/models/transformer2d.h"

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

/// GEGLU: a · gelu(g) for the halves a, g of one projection to 8C, then back to C.   x: [B, L, C].
Tensor feed_forward(const Scope& s, Tensor x) {
  auto path = s.path_scope();
  const int64_t width = x.dim(-1), hidden = 4 * width;
  Tensor h = nn::linear(s / "net.0.proj", x, {.out = 2 * hidden, .in_axis = axis::kEmbed, .out_axis = axis::kMlp});
  h = named(gated_gelu(h), value::kFfnActivation);
  return nn::linear(s / "net.2", h, {.out = width, .in_axis = axis::kMlp, .out_axis = axis::kEmbed});
}

Tensor transformer_block(const Scope& s, Tensor x, Tensor context, const Transformer2DOptions& o) {
  auto path = s.path_scope();
  const nn::MultiHeadOptions heads{.heads = o.heads, .upcast = o.upcast_attention};
  Tensor n = nn::layer_norm(s / "norm1", x, 1e-5);
  nn::MultiHeadOptions to_context = heads;
  to_context.lengths = o.context_rows;
  x = x + (o.only_cross_attention ? nn::multi_head_attention(s / "attn1", n, context, to_context)
                                  : nn::multi_head_attention(s / "attn1", n, n, heads));
  const Scope cross = s / "attn2";
  if (o.image_attention) to_context.also = [&](Tensor q) { return o.image_attention(cross.path(), q); };
  x = x + nn::multi_head_attention(cross, nn::layer_norm(s / "norm2", x, 1e-5), context, to_context);
  return x + feed_forward(s / "ff", nn::layer_norm(s / "norm3", x, 1e-5));
}

}  // namespace

Tensor transformer2d(const Scope& s, Tensor x, Tensor context, const Transformer2DOptions& o) {
  auto path = s.path_scope();
  const int64_t width = x.dim(-1);
  Tensor h = nn::group_norm(s / "norm", x, o.groups, 1e-6);
  h = reshape(h, {x.dim(0), x.dim(1) * x.dim(2), width});
  auto project = [&](const char* name, const char* in, const char* out) {
    if (o.linear_projection) return nn::linear(s / name, h, {.out = width, .in_axis = in, .out_axis = out});
    Tensor y = nn::conv2d(s / name, reshape(h, x.dims()), {.out = width, .kernel = 1, .padding = 0});
    return reshape(y, h.dims());
  };
  h = project("proj_in", axis::kEmbed, axis::kHidden);
  h = nn::repeat(s / "transformer_blocks", o.layers, h,
                 [&](const Scope& b, Tensor y) { return transformer_block(b, y, context, o); });
  h = project("proj_out", axis::kHidden, axis::kEmbed);
  return shard(reshape(h, x.dims()) + x, {axis::kBatch, axis::kLength, axis::kKv, ""});
}

}  // namespace md
