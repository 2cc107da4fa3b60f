#include "maxdiffusion/ops/attention_parts.h"

#include <fmt/format.h>

#include <algorithm>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/attention_cudnn.h"
#include "maxdiffusion/ops/attention_tiles.h"
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

/// Scaled logits, −1e30 for masked keys. `first`: the first query's position, of the part; absent: 0. For one
/// head, how.lengths is a scalar.
Tensor logits(Tensor q, Tensor k, Tensor first, const LocalAttention& how) {
  const DType type = attention_sum_type(q.dtype());
  // Scaling bf16 queries would round them once more.
  Tensor s = q.dtype() == type ? rows_by_rows(q * how.scale, k, how, type) : rows_by_rows(q, k, how, type) * how.scale;
  if (how.bias) s = s + cast(how.bias, type);
  const Shape positions{DType::s32, {s.dim(-2), s.dim(-1)}};
  auto from = [](Tensor position, Tensor start) { return start ? position + start : position; };
  Tensor key = from(iota(s.graph(), positions, 1), how.first_key);
  auto keep = [&](Tensor seen) { s = where(broadcast_to(seen, s.dims()), s, scalar_like(s, -1e30)); };
  if (how.causal) keep(le(key, from(from(iota(s.graph(), positions, 0), how.first_query), first)));
  if (how.keys >= 0) keep(lt(key, scalar_like(key, static_cast<double>(how.keys))));
  if (how.lengths && how.lengths.rank() == 0) keep(lt(key, broadcast_to(how.lengths, key.dims())));
  if (how.lengths && how.lengths.rank() == 1) {  // without a mask of queries and keys
    const Dims dims = {s.dim(0), 1, 1, s.dim(3)};
    Tensor place = from(iota(s.graph(), {DType::s32, dims}, 3), how.first_key);
    keep(lt(place, broadcast_to(reshape(how.lengths, {s.dim(0), 1, 1, 1}), dims)));
  }
  return s;
}

AttentionResult composed(Tensor q, Tensor k, Tensor v, Tensor first, const LocalAttention& how) {
  Tensor s = logits(q, k, first, how), most = stop_gradient(max(s, {-1}, true)), e = exp(s - most),
         total = sum(e, {-1}, true);
  Tensor y = rows_by_columns(cast(e, v.dtype()), v, how, s.dtype()) / total;
  return {y, squeeze(most + log(total), -1)};
}

/// `summed`: Σ y · dy of each row.
AttentionGradient composed_gradient(Tensor q, Tensor k, Tensor v, Tensor lse, Tensor dy, Tensor summed, Tensor first,
                                    const LocalAttention& how) {
  Graph& g = q.graph();
  const size_t before = g.nodes().size();
  Tensor s = logits(q, k, first, how), p = exp(s - expand_dims(lse, -1));
  for (size_t i = before; i < g.nodes().size(); ++i) g.nodes()[i]->recomputed = true;
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
  // Else compilers see that these logits are the forward pass's, and keep those until here. Of layers in a loop the
  // forward pass is in another loop; these may be one with those that are made again here for y.
  std::vector<Tensor> later = {q, k, dy};
  if (!q.graph().in_loop()) later = optimization_barrier(later);
  Tensor rows = heads_first(later[2]);
  const AttentionGradient g = composed_gradient(heads_first(later[0]), heads_first(later[1]), heads_first(v), lse, rows,
                                                row_sums(heads_first(y), rows), {}, how);
  return {heads_first(g.q), heads_first(g.k), heads_first(g.v)};
}

// ---- head by head and block by block

/// An axis of lengths cut into blocks of equal size, which may end in zeros.
struct Blocks {
  int64_t length, count, size;

  /// [B, L, H, D] → [B·H, count, size, D].
  Tensor cut(Tensor x) const { return reshape(padded(heads_first(x)), {x.dim(0) * x.dim(2), count, size, x.dim(3)}); }
  /// [B, H, L] → [B·H, count, size].
  Tensor cut_rows(Tensor x) const { return reshape(padded(x), {x.dim(0) * x.dim(1), count, size}); }
  /// [B·H, count, size, D] → [B, L, H, D].
  Tensor joined(Tensor x, int64_t batch) const {
    const int64_t heads = x.dim(0) / batch;
    return heads_first(slice_axis(reshape(x, {batch, heads, count * size, x.dim(-1)}), 2, 0, length));
  }
  /// [B·H, count, size] → [B, H, L].
  Tensor joined_rows(Tensor x, int64_t batch) const {
    return slice_axis(reshape(x, {batch, x.dim(0) / batch, count * size}), 2, 0, length);
  }
  /// Position of the first of the step's block.
  Tensor first(ScanStep& step) const { return step.index() * static_cast<double>(size); }

 private:
  Tensor padded(Tensor x) const { return pad_end(x, 2, count * size); }
};
constexpr int64_t kQueries = 1024;  // default of a block

/// The first size that is given; 0: none.
int64_t first_set(std::initializer_list<int64_t> sizes) {
  for (int64_t size : sizes)
    if (size > 0) return size;
  return 0;
}

/// As few blocks of queries as there can be.
Blocks blocks_of_queries(int64_t length, int64_t most) {
  const int64_t count = (length + most - 1) / most;
  return {length, count, (length + count - 1) / count};
}
/// Blocks of keys of a size that divides the length, so that nothing is masked. Where the largest such size is less
/// than half of `most`, they are padded with zeros, which `how` masks; not with positions, which are not those of these
/// zeros.
Blocks blocks_of_keys(int64_t length, int64_t most, LocalAttention& how) {
  most = most > 0 ? std::min(most, length) : length;
  int64_t size = most;
  while (length % size != 0) --size;
  if (2 * size >= most || how.first_key) return {length, length / size, size};
  if (how.keys < 0) how.keys = length;
  return blocks_of_queries(length, most);
}

/// The stacked results of a loop that carries nothing. (A scan needs a carry.)
std::vector<Tensor> each(int64_t n, Tensor like, const std::function<std::vector<Tensor>(ScanStep&)>& body) {
  return scan(n, {constant(like.graph(), 0)},
              [&](ScanStep& step, const std::vector<Tensor>& nothing) {
                return ScanResult{nothing, body(step)};
              })
      .stacked;
}

/// `how` for the step's block of keys.
LocalAttention for_keys(const LocalAttention& how, const Blocks& keys, ScanStep& step) {
  LocalAttention block = how;
  if (keys.count == 1 || (!how.causal && how.keys < 0 && !how.lengths)) return block;
  block.first_key = how.first_key ? keys.first(step) + how.first_key : keys.first(step);
  return block;
}

/// Lengths of the keys of every head, [B·H]; absent where there are none.
Tensor lengths_of_heads(const LocalAttention& how, int64_t batch, int64_t heads) {
  if (!how.lengths) return {};
  return reshape(broadcast_to(expand_dims(how.lengths, 1), {batch, heads}), {batch * heads});
}
/// `how` for the step's head.
LocalAttention for_head(const LocalAttention& how, Tensor lengths, ScanStep& head) {
  LocalAttention own = how;
  if (lengths) own.lengths = head.slice(lengths);
  return own;
}

AttentionResult in_blocks(Tensor q, Tensor k, Tensor v, const LocalAttention& given) {
  LocalAttention how = given;
  const int64_t batch = q.dim(0);
  const DType type = attention_sum_type(q.dtype());
  const Blocks rows = blocks_of_queries(q.dim(1), first_set({how.blocks.queries, kQueries})),
               cols = blocks_of_keys(k.dim(1), how.blocks.keys, how);
  Tensor queries = rows.cut(q), keys = cols.cut(k), values = cols.cut(v),
         lengths = lengths_of_heads(how, batch, q.dim(2));
  const std::vector<Tensor> out = each(queries.dim(0), q, [&](ScanStep& head) {
    Tensor qh = head.slice(queries), kh = head.slice(keys), vh = head.slice(values);
    const LocalAttention own = for_head(how, lengths, head);
    return each(rows.count, qh, [&](ScanStep& row) {
      Tensor block = row.slice(qh), first = rows.first(row);
      Tensor y = full(block.graph(), 0, {type, block.dims()}), none = full(block.graph(), -1e30, {type, {rows.size}});
      return scan(cols.count, {y, none},
                  [&](ScanStep& col, const std::vector<Tensor>& sums) {
                    const AttentionResult part = composed(col.body().capture(block), col.slice(kh), col.slice(vh),
                                                          first, for_keys(own, cols, col));
                    if (cols.count == 1) return ScanResult{{part.y, part.lse}, {}};
                    const AttentionResult sum =
                        merge_attention({sums[0], sums[1]}, part, [](Tensor lse) { return expand_dims(lse, -1); });
                    return ScanResult{{sum.y, sum.lse}, {}};
                  })
          .carry;
    });
  });
  return {rows.joined(out[0], batch), rows.joined_rows(out[1], batch)};
}

AttentionGradient in_blocks_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                     const LocalAttention& given) {
  LocalAttention how = given;
  const int64_t batch = q.dim(0);
  const AttentionBlocks most = how.blocks;
  const Blocks rows = blocks_of_queries(q.dim(1), first_set({most.gradient_queries, most.queries, kQueries})),
               cols = blocks_of_keys(k.dim(1), first_set({most.gradient_keys, most.keys}), how);
  const DType type = attention_sum_type(q.dtype());
  Tensor queries = rows.cut(q), slopes = rows.cut(dy), totals = rows.cut_rows(lse),
         sums = rows.cut_rows(transpose(row_sums(y, dy), {0, 2, 1})), keys = cols.cut(k), values = cols.cut(v),
         lengths = lengths_of_heads(how, batch, q.dim(2));
  const std::vector<Tensor> out = each(queries.dim(0), q, [&](ScanStep& head) {
    Tensor qh = head.slice(queries), dh = head.slice(slopes), lh = head.slice(totals), sh = head.slice(sums),
           kh = head.slice(keys), vh = head.slice(values);
    const LocalAttention own = for_head(how, lengths, head);
    // A block of keys meets all queries, whose gradients add up over the blocks.
    const ScanResult of_head =
        scan(cols.count, {full(qh.graph(), 0, {type, qh.dims()})}, [&](ScanStep& col, const std::vector<Tensor>& dq) {
          Tensor kb = col.slice(kh), vb = col.slice(vh), none = full(kb.graph(), 0, {type, kb.dims()});
          const LocalAttention seen = for_keys(own, cols, col);
          const ScanResult r = scan(rows.count, {none, none}, [&](ScanStep& row, const std::vector<Tensor>& sum) {
            const AttentionGradient g =
                composed_gradient(row.slice(qh), row.body().capture(kb), row.body().capture(vb), row.slice(lh),
                                  row.slice(dh), row.slice(sh), rows.first(row), seen);
            return ScanResult{{sum[0] + g.k, sum[1] + g.v}, {g.q}};
          });
          return ScanResult{{dq[0] + r.stacked[0]}, {r.carry[0], r.carry[1]}};
        });
    return std::vector<Tensor>{of_head.carry[0], of_head.stacked[0], of_head.stacked[1]};
  });
  return {rows.joined(out[0], batch), cols.joined(out[1], batch), cols.joined(out[2], batch)};
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
                        .backend_config = fmt::format("scale = {:.17e} : f64, causal = {}, in_bf16 = {}", o.scale,
                                                      o.causal, c.options().cpu_kernels.bf16_products)};
  const auto out = emit_custom_call(c, in, call);
  for (size_t i = 0; i < out.size(); ++i) c.set_out(out[i], static_cast<int>(i));
}

/// in: q, k, v, y, lse, dy, perhaps lengths.
constexpr OpDef kAttentionGrad = {
    .name = "attention_grad",
    .infer = [](const InferCtx& c) { return std::vector<Shape>(c.in.begin(), c.in.begin() + 3); },
    .emit = [](EmitCtx& c) { emit_kernel(c, kAttentionGradKernel); },
    .flops = [](const Node& n) { return attention_flops(n, 4); },  // the logits are made again, which does not count
};

/// in: q, k, v, perhaps lengths; out: y and the logarithm of each row's sum of exponentials, which only the gradient
/// reads.
constexpr OpDef kAttention = {
    .name = "attention",
    .infer =
        [](const InferCtx& c) {
          const Shape& q = c.in[0];
          return std::vector<Shape>{q, {DType::f32, {q.dim(0), q.dim(2), q.dim(1)}}};
        },
    .emit = [](EmitCtx& c) { emit_kernel(c, kAttentionKernel); },
    .vjp = [](const VjpCtx& c) -> Grads {
      std::vector<Tensor> in = {c.in(0), c.in(1), c.in(2), c.out(0), c.out(1), c.dy(0)};
      if (c.in_count() > 3) in.push_back(c.in(3));
      Grads grads = apply_multi(kAttentionGrad, in, c.attrs<KernelOptions>());
      grads.resize(c.in_count());
      return grads;
    },
    .flops = [](const Node& n) { return attention_flops(n, 2); },
};

// ---- the table

struct Call {
  Tensor q, k, v;
  const LocalAttention& how;
};
struct Functions {
  AttentionResult (*forward)(Tensor q, Tensor k, Tensor v, const LocalAttention&);
  AttentionGradient (*gradient)(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy, const LocalAttention&);
};

const char* kernel_refuses(const Call& c) {
  if (c.how.bias) return "there is a bias";
  if (c.how.first_query || c.how.first_key || c.how.keys >= 0) return "positions are set";
  return kernels_support({c.q, c.k, c.v}) ? nullptr : kNotForCpuKernels;
}

constexpr Functions kKernel = {
    [](Tensor q, Tensor k, Tensor v, const LocalAttention& how) {
      std::vector<Tensor> in = {q, k, v};
      if (how.lengths) in.push_back(how.lengths);
      const auto out = apply_multi(kAttention, in, KernelOptions{how.scale, how.causal});
      return AttentionResult{out[0], out[1]};
    },
    [](Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy, const LocalAttention& how) {
      std::vector<Tensor> in = {q, k, v, cast(y, q.dtype()), lse, cast(dy, q.dtype())};
      if (how.lengths) in.push_back(how.lengths);
      const auto out = apply_multi(kAttentionGrad, in, KernelOptions{how.scale, how.causal});
      return AttentionGradient{out[0], out[1], out[2]};
    }};

const char* cudnn_refuses(const Call& c) { return cudnn_attention_refuses(c.q, c.k, c.v, c.how); }

constexpr KernelRow<Call, Functions> kRows[] = {
    {kAttentionKernel, kernel_refuses, [](const Call&) { return kKernel; }},
    {"cuDNN", cudnn_refuses,
     [](const Call&) {
       return Functions{cudnn_attention, cudnn_attention_gradient};
     }},
    {"TPU kernel", [](const Call& c) { return tile_attention_refuses(c.q, c.k, c.v, c.how); },
     [](const Call&) {
       return Functions{tile_attention, tile_attention_gradient};
     }},
    {"blocks", [](const Call& c) { return c.how.in_blocks ? nullptr : "all logits are requested"; },
     [](const Call&) {
       return Functions{in_blocks, in_blocks_gradient};
     }},
    {"all logits", never,
     [](const Call&) {
       return Functions{whole, whole_gradient};
     }},
};

Functions functions_for(const Call& call) {
  const auto& row = kernel_for(kRows, call);
  if (call.how.blocks != AttentionBlocks() &&
      (std::string_view(row.name) == kAttentionKernel || std::string_view(row.name) == "cuDNN"))
    log_info_once("flash_block_sizes has no effect where attention is {}, which chooses sizes itself", row.name);
  if (call.q.graph().options().cudnn_attention && call.how.in_blocks && std::string_view(row.name) != "cuDNN")
    log_info_once("attention: q {} and k {} use {} instead of cuDNN: {}", to_string(call.q.shape()),
                  to_string(call.k.shape()), row.name, cudnn_refuses(call));
  return row.build(call);
}

}  // namespace

double attention_flops(const Node& n, double products) {
  return products * 2 * static_cast<double>(n.inputs[0].shape().elements()) * static_cast<double>(n.inputs[1].dim(1));
}

DType attention_sum_type(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

AttentionResult merge_attention(const AttentionResult& a, const AttentionResult& b, Tensor (*broadcast)(Tensor lse)) {
  Tensor most = maximum(a.lse, b.lse), of_a = exp(a.lse - most), of_b = exp(b.lse - most), total = of_a + of_b;
  const DType type = total.dtype();
  return {(cast(a.y, type) * broadcast(of_a) + cast(b.y, type) * broadcast(of_b)) / broadcast(total),
          most + log(total)};
}

AttentionResult local_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& how) {
  return functions_for({q, k, v, how}).forward(q, k, v, how);
}

AttentionGradient local_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                           const LocalAttention& how) {
  return functions_for({q, k, v, how}).gradient(q, k, v, y, lse, dy, how);
}

OpList attention_ops() { return {&kAttention, &kAttentionGrad}; }

}  // namespace md
