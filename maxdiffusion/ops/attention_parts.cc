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
Tensor rows_by_rows(Tensor a, Tensor b, const LocalAttention& options, DType type) {
  const Axes batch = leading_axes(a);
  return dot(a, b, {{a.rank() - 1}, {b.rank() - 1}, batch, batch, options.precision}, type);
}
/// a · b.
Tensor rows_by_columns(Tensor a, Tensor b, const LocalAttention& options, DType type) {
  const Axes batch = leading_axes(a);
  return dot(a, b, {{a.rank() - 1}, {b.rank() - 2}, batch, batch, options.precision}, type);
}
/// aᵀ · b.
Tensor columns_by_columns(Tensor a, Tensor b, const LocalAttention& options, DType type) {
  const Axes batch = leading_axes(a);
  return dot(a, b, {{a.rank() - 2}, {b.rank() - 2}, batch, batch, options.precision}, type);
}

/// Scaled logits, −1e30 for masked keys. `first`: position of the first query within the part; absent: 0. For a single
/// head, options.lengths is a scalar.
Tensor logits(Tensor q, Tensor k, Tensor first, const LocalAttention& options) {
  const DType type = attention_sum_type(q.dtype());
  // Scaling bf16 queries would round them again.
  Tensor s = q.dtype() == type ? rows_by_rows(q * options.scale, k, options, type)
                               : rows_by_rows(q, k, options, type) * options.scale;
  if (options.bias) s = s + cast(options.bias, type);
  const Shape positions{DType::s32, {s.dim(-2), s.dim(-1)}};
  auto from = [](Tensor position, Tensor start) { return start ? position + start : position; };
  Tensor key = from(iota(s.graph(), positions, 1), options.first_key);
  auto keep = [&](Tensor visible) { s = where(broadcast_to(visible, s.dims()), s, scalar_like(s, -1e30)); };
  if (options.causal) keep(le(key, from(from(iota(s.graph(), positions, 0), options.first_query), first)));
  if (options.keys >= 0) keep(lt(key, scalar_like(key, static_cast<double>(options.keys))));
  if (options.lengths && options.lengths.rank() == 0) keep(lt(key, broadcast_to(options.lengths, key.dims())));
  if (options.key_bias)
    s = s + broadcast_to(cast(reshape(options.key_bias, {s.dim(0), 1, 1, s.dim(3)}), type), s.dims());
  if (options.key_segments)
    keep(eq(broadcast_to(reshape(options.query_segments, {s.dim(0), 1, s.dim(2), 1}), s.dims()),
            broadcast_to(reshape(options.key_segments, {s.dim(0), 1, 1, s.dim(3)}), s.dims())));
  if (options.lengths && options.lengths.rank() == 1) {  // no mask of queries and keys is needed
    const Dims dims = {s.dim(0), 1, 1, s.dim(3)};
    Tensor place = from(iota(s.graph(), {DType::s32, dims}, 3), options.first_key);
    keep(lt(place, broadcast_to(reshape(options.lengths, {s.dim(0), 1, 1, 1}), dims)));
  }
  return s;
}

AttentionResult composed(Tensor q, Tensor k, Tensor v, Tensor first, const LocalAttention& options) {
  Tensor s = logits(q, k, first, options), most = stop_gradient(max(s, {-1}, true)), e = exp(s - most),
         total = sum(e, {-1}, true);
  Tensor y = rows_by_columns(cast(e, v.dtype()), v, options, s.dtype()) / total;
  return {y, squeeze(most + log(total), -1)};
}

/// `summed`: Σ y · dy of each row.
AttentionGradient composed_gradient(Tensor q, Tensor k, Tensor v, Tensor lse, Tensor dy, Tensor summed, Tensor first,
                                    const LocalAttention& options) {
  Graph& g = q.graph();
  const size_t before = g.nodes().size();
  Tensor s = logits(q, k, first, options), p = exp(s - expand_dims(lse, -1));
  for (size_t i = before; i < g.nodes().size(); ++i) g.nodes()[i]->recomputed = true;
  Tensor dp = rows_by_rows(dy, v, options, s.dtype()), of_logits = p * (dp - expand_dims(summed, -1));
  Tensor ds = cast(of_logits * options.scale, q.dtype());
  return {rows_by_columns(ds, k, options, s.dtype()), columns_by_columns(ds, q, options, s.dtype()),
          columns_by_columns(cast(p, dy.dtype()), dy, options, s.dtype()),
          options.key_bias ? sum(of_logits, {1, 2}) : Tensor()};
}

Tensor heads_first(Tensor x) { return transpose(x, {0, 2, 1, 3}); }  // its own inverse

Tensor row_sums(Tensor y, Tensor dy) {
  const DType type = attention_sum_type(dy.dtype());
  return sum(cast(y, type) * cast(dy, type), {-1});
}

// ---- all logits at once

AttentionResult whole(Tensor q, Tensor k, Tensor v, const LocalAttention& options) {
  AttentionResult r = composed(heads_first(q), heads_first(k), heads_first(v), {}, options);
  return {heads_first(r.y), r.lse};
}

AttentionGradient whole_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                 const LocalAttention& options) {
  // Otherwise the compiler would reuse and store the forward pass's logits. In a loop over layers the forward pass is
  // in another loop, and recomputed logits may be merged with those that are recomputed for y.
  std::vector<Tensor> later = {q, k, dy};
  if (!q.graph().in_loop()) later = optimization_barrier(later);
  Tensor rows = heads_first(later[2]);
  const AttentionGradient g = composed_gradient(heads_first(later[0]), heads_first(later[1]), heads_first(v), lse, rows,
                                                row_sums(heads_first(y), rows), {}, options);
  return {heads_first(g.q), heads_first(g.k), heads_first(g.v), g.key_bias};
}

// ---- head by head and block by block

/// An axis of length `length` split into blocks of equal size, the last one zero-padded.
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
  /// Position of the first element of the step's block.
  Tensor first(ScanStep& step) const { return step.index() * static_cast<double>(size); }

 private:
  Tensor padded(Tensor x) const { return pad_end(x, 2, count * size); }
};
constexpr int64_t kQueries = 1024;  // default of a block

/// The first size that is not 0, else `otherwise`.
int64_t first_set(std::initializer_list<int64_t> sizes, int64_t otherwise) {
  for (int64_t size : sizes)
    if (size > 0) return size;
  return otherwise;
}

/// The smallest possible number of blocks of queries.
Blocks blocks_of_queries(int64_t length, int64_t most) {
  const int64_t count = (length + most - 1) / most;
  return {length, count, (length + count - 1) / count};
}
/// Blocks of keys whose size divides the length, so that nothing is masked. If the largest such size is less than half
/// of `most`, the keys are zero-padded and `options` masks the padding; not with global positions, which would not be
/// those of the padding.
Blocks blocks_of_keys(int64_t length, int64_t most, LocalAttention& options) {
  most = most > 0 ? std::min(most, length) : length;
  int64_t size = most;
  while (length % size != 0) --size;
  if (2 * size >= most || options.first_key) return {length, length / size, size};
  if (options.keys < 0) options.keys = length;
  return blocks_of_queries(length, most);
}

/// The stacked results of a loop without carry (with a dummy, because a scan needs one).
std::vector<Tensor> each(int64_t n, Tensor like, const std::function<std::vector<Tensor>(ScanStep&)>& body) {
  return scan(n, {constant(like.graph(), 0)},
              [&](ScanStep& step, const std::vector<Tensor>& nothing) {
                return ScanResult{nothing, body(step)};
              })
      .stacked;
}

/// `options` for the step's block of keys.
LocalAttention for_keys(const LocalAttention& options, const Blocks& keys, ScanStep& step) {
  LocalAttention block = options;
  if (keys.count == 1 || (!options.causal && options.keys < 0 && !options.lengths)) return block;
  block.first_key = options.first_key ? keys.first(step) + options.first_key : keys.first(step);
  return block;
}

/// Number of keys of every head, [B·H]; absent without lengths.
Tensor lengths_of_heads(const LocalAttention& options, int64_t batch, int64_t heads) {
  if (!options.lengths) return {};
  return reshape(broadcast_to(expand_dims(options.lengths, 1), {batch, heads}), {batch * heads});
}
/// `options` for the step's head.
LocalAttention for_head(const LocalAttention& options, Tensor lengths, ScanStep& head) {
  LocalAttention head_options = options;
  if (lengths) head_options.lengths = head.slice(lengths);
  return head_options;
}

AttentionResult in_blocks(Tensor q, Tensor k, Tensor v, const LocalAttention& requested) {
  LocalAttention options = requested;
  const int64_t batch = q.dim(0);
  const DType type = attention_sum_type(q.dtype());
  const Blocks rows = blocks_of_queries(q.dim(1), first_set({options.blocks.queries}, kQueries)),
               cols = blocks_of_keys(k.dim(1), options.blocks.keys, options);
  Tensor queries = rows.cut(q), keys = cols.cut(k), values = cols.cut(v),
         lengths = lengths_of_heads(options, batch, q.dim(2));
  const std::vector<Tensor> out = each(queries.dim(0), q, [&](ScanStep& head) {
    Tensor qh = head.slice(queries), kh = head.slice(keys), vh = head.slice(values);
    const LocalAttention head_options = for_head(options, lengths, head);
    return each(rows.count, qh, [&](ScanStep& row) {
      Tensor block = row.slice(qh), first = rows.first(row);
      Tensor y = full(block.graph(), 0, {type, block.dims()}), none = full(block.graph(), -1e30, {type, {rows.size}});
      return scan(cols.count, {y, none},
                  [&](ScanStep& col, const std::vector<Tensor>& sums) {
                    const AttentionResult part = composed(col.body().capture(block), col.slice(kh), col.slice(vh),
                                                          first, for_keys(head_options, cols, col));
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
                                     const LocalAttention& requested) {
  LocalAttention options = requested;
  const int64_t batch = q.dim(0);
  const AttentionBlocks most = options.blocks;
  const Blocks rows = blocks_of_queries(q.dim(1), first_set({most.gradient_queries, most.queries}, kQueries)),
               cols = blocks_of_keys(k.dim(1), first_set({most.gradient_keys, most.keys}, 0), options);
  const DType type = attention_sum_type(q.dtype());
  Tensor queries = rows.cut(q), slopes = rows.cut(dy), totals = rows.cut_rows(lse),
         sums = rows.cut_rows(transpose(row_sums(y, dy), {0, 2, 1})), keys = cols.cut(k), values = cols.cut(v),
         lengths = lengths_of_heads(options, batch, q.dim(2));
  const std::vector<Tensor> out = each(queries.dim(0), q, [&](ScanStep& head) {
    Tensor qh = head.slice(queries), dh = head.slice(slopes), lh = head.slice(totals), sh = head.slice(sums),
           kh = head.slice(keys), vh = head.slice(values);
    const LocalAttention head_options = for_head(options, lengths, head);
    // Each block of keys is combined with all queries, whose gradients are summed over the blocks.
    const ScanResult of_head =
        scan(cols.count, {full(qh.graph(), 0, {type, qh.dims()})}, [&](ScanStep& col, const std::vector<Tensor>& dq) {
          Tensor kb = col.slice(kh), vb = col.slice(vh), none = full(kb.graph(), 0, {type, kb.dims()});
          const LocalAttention key_options = for_keys(head_options, cols, col);
          const ScanResult r = scan(rows.count, {none, none}, [&](ScanStep& row, const std::vector<Tensor>& sum) {
            const AttentionGradient g =
                composed_gradient(row.slice(qh), row.body().capture(kb), row.body().capture(vb), row.slice(lh),
                                  row.slice(dh), row.slice(sh), rows.first(row), key_options);
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

/// Inputs: q, k, v, y, lse, dy, optionally lengths.
constexpr OpDef kAttentionGrad = {
    .name = "attention_grad",
    .infer = [](const InferCtx& c) { return std::vector<Shape>(c.in.begin(), c.in.begin() + 3); },
    .emit = [](EmitCtx& c) { emit_kernel(c, kAttentionGradKernel); },
    .flops = [](const Node& n) { return attention_flops(n, 4); },  // recomputed logits are not counted
};

/// Inputs: q, k, v, optionally lengths. Outputs: y, and the logarithm of each row's sum of exponentials, which only the
/// gradient reads.
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
  const LocalAttention& options;
};
struct Functions {
  AttentionResult (*forward)(Tensor q, Tensor k, Tensor v, const LocalAttention&);
  AttentionGradient (*gradient)(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy, const LocalAttention&);
  bool grouped = false;  // supports fewer heads of k and v than of q; otherwise heads are repeated
};

const char* kernel_refuses(const Call& c) {
  if (c.options.bias || c.options.key_bias) return "there is a bias";
  if (c.options.key_segments) return "there are segments";
  if (c.options.first_query || c.options.first_key || c.options.keys >= 0) return "positions are set";
  return kernels_support({c.q, c.k, c.v}) ? nullptr : kNotForCpuKernels;
}

constexpr Functions kKernel = {
    [](Tensor q, Tensor k, Tensor v, const LocalAttention& options) {
      std::vector<Tensor> in = {q, k, v};
      if (options.lengths) in.push_back(options.lengths);
      const auto out = apply_multi(kAttention, in, KernelOptions{options.scale, options.causal});
      return AttentionResult{out[0], out[1]};
    },
    [](Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy, const LocalAttention& options) {
      std::vector<Tensor> in = {q, k, v, cast(y, q.dtype()), lse, cast(dy, q.dtype())};
      if (options.lengths) in.push_back(options.lengths);
      const auto out = apply_multi(kAttentionGrad, in, KernelOptions{options.scale, options.causal});
      return AttentionGradient{out[0], out[1], out[2]};
    }};

const char* blocks_refuse(const Call& c) {
  if (!c.options.in_blocks) return "all logits are requested";
  return c.options.key_bias || c.options.key_segments ? "there is a bias or there are segments" : nullptr;
}

const char* cudnn_refuses(const Call& c) { return cudnn_attention_refuses(c.q, c.k, c.v, c.options); }

constexpr KernelRow<Call, Functions> kRows[] = {
    {kAttentionKernel, kernel_refuses, [](const Call&) { return kKernel; }},
    {"cuDNN", cudnn_refuses,
     [](const Call&) {
       return Functions{cudnn_attention, cudnn_attention_gradient};
     }},
    {"tile kernel", [](const Call& c) { return tile_attention_refuses(c.q, c.k, c.v, c.options); },
     [](const Call&) {
       return Functions{tile_attention, tile_attention_gradient, true};
     }},
    {"blocks", blocks_refuse,
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
  const bool on_gpu = call.q.graph().options().platform == Platform::gpu;
  const std::string_view name = row.name;
  AttentionBlocks sizes = call.options.blocks;
  sizes.search = nullptr;
  if (sizes != AttentionBlocks() && (name == kAttentionKernel || name == "cuDNN" || (name == "tile kernel" && on_gpu)))
    log_info_once("flash_block_sizes is ignored where attention is {}, which chooses sizes itself", name);
  if (call.options.blocks.search && (name != "tile kernel" || on_gpu))
    log_info_once("enable_tile_search is ignored where attention is {}: it is for the kernels of TPUs", name);
  if (call.q.graph().options().nvidia_kernels && call.options.in_blocks && name != "cuDNN")
    log_info_once("attention: q {} and k {} use {} instead of cuDNN: {}", to_string(call.q.shape()),
                  to_string(call.k.shape()), name, cudnn_refuses(call));
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

AttentionResult local_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& options) {
  const Functions run = functions_for({q, k, v, options});
  const int64_t group = run.grouped ? 1 : q.dim(2) / k.dim(2);
  return run.forward(q, repeated_heads(k, group), repeated_heads(v, group), options);
}

AttentionGradient local_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                           const LocalAttention& options) {
  const Functions run = functions_for({q, k, v, options});
  const int64_t heads = k.dim(2), group = run.grouped ? 1 : q.dim(2) / heads;
  AttentionGradient g = run.gradient(q, repeated_heads(k, group), repeated_heads(v, group), y, lse, dy, options);
  if (group > 1)
    for (Tensor* d : {&g.k, &g.v})
      *d = sum(reshape(cast(*d, attention_sum_type(q.dtype())), {k.dim(0), k.dim(1), heads, group, k.dim(3)}), {3});
  return g;
}

Tensor repeated_heads(Tensor x, int64_t times) {
  if (times == 1) return x;
  const Dims& d = x.dims();
  return reshape(broadcast_to(expand_dims(x, 3), {d[0], d[1], d[2], times, d[3]}), {d[0], d[1], d[2] * times, d[3]});
}

OpList attention_ops() { return {&kAttention, &kAttentionGrad}; }

}  // namespace md
