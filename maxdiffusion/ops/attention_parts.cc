#include "maxdiffusion/ops/attention_parts.h"

#include <fmt/format.h>

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/kernel_table.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

// ---- composed operations, on q [..., Lq, D], k and v [..., Lk, D]

Axes leading_axes(Tensor x) {
  Axes axes;
  for (int64_t i = 0; i + 2 < x.rank(); ++i) axes.push_back(i);
  return axes;
}

/// a · bᵀ over the last axes.
Tensor rows_by_rows(Tensor a, Tensor b, const LocalAttention& how, DType type) {
  const Axes batch = leading_axes(a);
  return dot(a, b, {{a.rank() - 1}, {b.rank() - 1}, batch, batch, how.precision}, type);
}
/// a · b.
Tensor rows_by_columns(Tensor a, Tensor b, const LocalAttention& how, DType type) {
  const Axes batch = leading_axes(a);
  return dot(a, b, {{a.rank() - 1}, {b.rank() - 2}, batch, batch, how.precision}, type);
}
/// aᵀ · b.
Tensor columns_by_columns(Tensor a, Tensor b, const LocalAttention& how, DType type) {
  const Axes batch = leading_axes(a);
  return dot(a, b, {{a.rank() - 2}, {b.rank() - 2}, batch, batch, how.precision}, type);
}

/// Scaled logits, −1e30 where a key is not seen. `first`: the first query's position, of the part; absent: 0.
Tensor logits(Tensor q, Tensor k, Tensor first, const LocalAttention& how) {
  const DType type = attention_sum_type(q.dtype());
  // Scaling bf16 queries would round them once more.
  Tensor s = q.dtype() == type ? rows_by_rows(q * how.scale, k, how, type) : rows_by_rows(q, k, how, type) * how.scale;
  const Shape positions{DType::s32, {s.dim(-2), s.dim(-1)}};
  auto from = [](Tensor position, Tensor start) { return start ? position + start : position; };
  Tensor key = from(iota(s.graph(), positions, 1), how.first_key);
  auto keep = [&](Tensor seen) { s = where(broadcast_to(seen, s.dims()), s, scalar_like(s, -1e30)); };
  if (how.causal) keep(le(key, from(from(iota(s.graph(), positions, 0), how.first_query), first)));
  if (how.keys >= 0) keep(lt(key, scalar_like(key, static_cast<double>(how.keys))));
  return s;
}

AttentionResult composed(Tensor q, Tensor k, Tensor v, Tensor first, const LocalAttention& how) {
  Tensor s = logits(q, k, first, how), most = max(s, {-1}, true), e = exp(s - most), total = sum(e, {-1}, true);
  Tensor y = rows_by_columns(cast(e, v.dtype()), v, how, s.dtype()) / total;
  return {y, squeeze(most + log(total), -1)};
}

/// `summed`: Σ y · dy of each row.
AttentionGradient composed_gradient(Tensor q, Tensor k, Tensor v, Tensor lse, Tensor dy, Tensor summed, Tensor first,
                                    const LocalAttention& how) {
  Tensor s = logits(q, k, first, how), p = exp(s - expand_dims(lse, -1));
  Tensor dp = rows_by_rows(dy, v, how, s.dtype());
  Tensor ds = cast(p * (dp - expand_dims(summed, -1)) * how.scale, q.dtype());
  return {rows_by_columns(ds, k, how, s.dtype()), columns_by_columns(ds, q, how, s.dtype()),
          columns_by_columns(cast(p, dy.dtype()), dy, how, s.dtype())};
}

Tensor heads_first(Tensor x) { return transpose(x, {0, 2, 1, 3}); }  // its own inverse

Tensor row_sums(Tensor y, Tensor dy) {
  const DType type = attention_sum_type(dy.dtype());
  return sum(cast(y, type) * cast(dy, type), {-1});
}

// ---- all logits at once

AttentionResult whole(Tensor q, Tensor k, Tensor v, const LocalAttention& how) {
  AttentionResult r = composed(heads_first(q), heads_first(k), heads_first(v), {}, how);
  return {heads_first(r.y), r.lse};
}

AttentionGradient whole_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                 const LocalAttention& how) {
  Tensor rows = heads_first(dy);
  const AttentionGradient g = composed_gradient(heads_first(q), heads_first(k), heads_first(v), lse, rows,
                                                row_sums(heads_first(y), rows), {}, how);
  return {heads_first(g.q), heads_first(g.k), heads_first(g.v)};
}

// ---- head by head and block by block

/// How the queries of a head are cut into blocks of at most 1024; the last one may end in zeros.
struct Blocks {
  int64_t batch, heads, length, count, size;

  explicit Blocks(Tensor q)
      : batch(q.dim(0)),
        heads(q.dim(2)),
        length(q.dim(1)),
        count((length + 1023) / 1024),
        size((length + count - 1) / count) {}
  /// [B, L, H, D] → [B·H, count, size, D].
  Tensor cut(Tensor x) const { return reshape(padded(heads_first(x), 2), {batch * heads, count, size, x.dim(3)}); }
  Tensor joined(Tensor x) const {
    return heads_first(slice_axis(reshape(x, {batch, heads, count * size, x.dim(-1)}), 2, 0, length));
  }
  /// [B, H, L] → [B·H, count, size].
  Tensor cut_rows(Tensor x) const { return reshape(padded(x, 2), {batch * heads, count, size}); }
  Tensor joined_rows(Tensor x) const { return slice_axis(reshape(x, {batch, heads, count * size}), 2, 0, length); }
  /// [B, L, H, D] → [B·H, L, D].
  Tensor per_head(Tensor x) const { return reshape(heads_first(x), {batch * heads, x.dim(1), x.dim(3)}); }
  Tensor from_heads(Tensor x) const { return heads_first(reshape(x, {batch, heads, x.dim(1), x.dim(2)})); }

 private:
  Tensor padded(Tensor x, size_t axis) const {
    Dims low(x.dims().size(), 0), high = low;
    high[axis] = count * size - length;
    return high[axis] == 0 ? x : pad(x, 0, low, high);
  }
};

/// The stacked results of a loop that carries nothing. (A scan needs a carry.)
std::vector<Tensor> each(int64_t n, Tensor like, const std::function<std::vector<Tensor>(ScanStep&)>& body) {
  return scan(n, {constant(like.graph(), 0)},
              [&](ScanStep& step, const std::vector<Tensor>& nothing) {
                return ScanResult{nothing, body(step)};
              })
      .stacked;
}

Tensor first_of_block(ScanStep& step, const Blocks& blocks) { return step.index() * static_cast<double>(blocks.size); }

AttentionResult in_blocks(Tensor q, Tensor k, Tensor v, const LocalAttention& how) {
  const Blocks blocks(q);
  Tensor queries = blocks.cut(q), keys = blocks.per_head(k), values = blocks.per_head(v);
  const std::vector<Tensor> out = each(blocks.batch * blocks.heads, q, [&](ScanStep& head) {
    Tensor of_head = head.slice(queries), kh = head.slice(keys), vh = head.slice(values);
    return each(blocks.count, of_head, [&](ScanStep& step) {
      const AttentionResult r = composed(step.slice(of_head), kh, vh, first_of_block(step, blocks), how);
      return std::vector<Tensor>{r.y, r.lse};
    });
  });
  return {blocks.joined(out[0]), blocks.joined_rows(out[1])};
}

AttentionGradient in_blocks_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                     const LocalAttention& how) {
  const Blocks blocks(q);
  const DType type = attention_sum_type(q.dtype());
  Tensor queries = blocks.cut(q), slopes = blocks.cut(dy), totals = blocks.cut_rows(lse),
         sums = blocks.cut_rows(transpose(row_sums(y, dy), {0, 2, 1})), keys = blocks.per_head(k),
         values = blocks.per_head(v);
  const std::vector<Tensor> out = each(blocks.batch * blocks.heads, q, [&](ScanStep& head) {
    Tensor qh = head.slice(queries), dh = head.slice(slopes), lh = head.slice(totals), sh = head.slice(sums),
           kh = head.slice(keys), vh = head.slice(values);
    Tensor none = full(kh.graph(), 0, {type, kh.dims()});
    ScanResult r = scan(blocks.count, {none, none}, [&](ScanStep& step, const std::vector<Tensor>& carry) {
      const AttentionGradient g = composed_gradient(step.slice(qh), kh, vh, step.slice(lh), step.slice(dh),
                                                    step.slice(sh), first_of_block(step, blocks), how);
      return ScanResult{{carry[0] + g.k, carry[1] + g.v}, {g.q}};
    });
    return std::vector<Tensor>{r.stacked[0], r.carry[0], r.carry[1]};
  });
  return {blocks.joined(out[0]), blocks.from_heads(out[1]), blocks.from_heads(out[2])};
}

// ---- the CPU kernel

struct KernelOptions {
  double scale;
  bool causal;
};

void emit_kernel(EmitCtx& c, const char* target) {
  const auto& o = c.attrs<KernelOptions>();
  std::vector<Value> in;
  for (int i = 0; i < c.in_count(); ++i) in.push_back(c.in(i));
  const CustomCall call{.target = target,
                        .results = c.node().outputs,
                        .backend_config = fmt::format("scale = {:.17e} : f64, causal = {}", o.scale, o.causal)};
  const auto out = emit_custom_call(c, in, call);
  for (size_t i = 0; i < out.size(); ++i) c.set_out(out[i], static_cast<int>(i));
}

/// Of `products` matrix products of the size of q·kᵀ.
double flops_of(const Node& n, double products) {
  return products * 2 * static_cast<double>(n.inputs[0].shape().elements()) * static_cast<double>(n.inputs[1].dim(1));
}

/// in: q, k, v, y, lse, dy.
constexpr OpDef kAttentionGrad = {
    .name = "attention_grad",
    .infer = [](const InferCtx& c) { return std::vector<Shape>(c.in.begin(), c.in.begin() + 3); },
    .emit = [](EmitCtx& c) { emit_kernel(c, kAttentionGradKernel); },
    .flops = [](const Node& n) { return flops_of(n, 5); },  // the logits are made again
};

/// in: q, k, v; out: y and the logarithm of each row's sum of exponentials, which only the gradient reads.
constexpr OpDef kAttention = {
    .name = "attention",
    .infer =
        [](const InferCtx& c) {
          const Shape& q = c.in[0];
          return std::vector<Shape>{q, {DType::f32, {q.dim(0), q.dim(2), q.dim(1)}}};
        },
    .emit = [](EmitCtx& c) { emit_kernel(c, kAttentionKernel); },
    .vjp = [](const VjpCtx& c) -> Grads {
      return apply_multi(kAttentionGrad, {c.in(0), c.in(1), c.in(2), c.out(0), c.out(1), c.dy(0)},
                         c.attrs<KernelOptions>());
    },
    .flops = [](const Node& n) { return flops_of(n, 2); },
};

// ---- the table

struct Call {
  Tensor q, k, v;
  const LocalAttention& how;
};
struct Row {
  const char* (*refuses)(const Call&);
  AttentionResult (*forward)(Tensor q, Tensor k, Tensor v, const LocalAttention&);
  AttentionGradient (*gradient)(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy, const LocalAttention&);
};

const char* kernel_refuses(const Call& c) {
  if (c.how.first_query || c.how.first_key || c.how.keys >= 0) return "positions are told";
  return kernels_take({c.q, c.k, c.v}) ? nullptr : kNotForCpuKernels;
}

constexpr Row kRows[] = {
    {kernel_refuses,
     [](Tensor q, Tensor k, Tensor v, const LocalAttention& how) {
       const auto out = apply_multi(kAttention, {q, k, v}, KernelOptions{how.scale, how.causal});
       return AttentionResult{out[0], out[1]};
     },
     [](Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy, const LocalAttention& how) {
       const auto out = apply_multi(kAttentionGrad, {q, k, v, cast(y, q.dtype()), lse, cast(dy, q.dtype())},
                                    KernelOptions{how.scale, how.causal});
       return AttentionGradient{out[0], out[1], out[2]};
     }},
    {[](const Call& c) { return c.how.blocks ? nullptr : "all logits are asked for"; }, in_blocks, in_blocks_gradient},
    {never, whole, whole_gradient},
};

const Row& row_for(const Call& call) {
  for (const Row& row : kRows)
    if (!row.refuses(call)) return row;
  return *(std::end(kRows) - 1);
}

}  // namespace

DType attention_sum_type(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

AttentionResult attend(Tensor q, Tensor k, Tensor v, const LocalAttention& how) {
  return row_for({q, k, v, how}).forward(q, k, v, how);
}

AttentionGradient attend_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                  const LocalAttention& how) {
  return row_for({q, k, v, how}).gradient(q, k, v, y, lse, dy, how);
}

OpList attention_ops() { return {&kAttention, &kAttentionGrad}; }

}  // namespace md
