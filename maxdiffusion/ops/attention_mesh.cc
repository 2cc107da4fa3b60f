#include "maxdiffusion/ops/attention_mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/round_up.h"
#include "maxdiffusion/ops/attention_parts.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/custom_vjp.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

using AxisNames = std::vector<std::string>;

Tensor cut(Tensor x, int64_t axis, int64_t length) {
  return x.dim(axis) == length ? x : slice_axis(x, axis, 0, length);
}

/// Gathers along several mesh axes, major first, as along one.
Tensor gather_over(Tensor x, const AxisNames& axes, int64_t dim) {
  for (size_t i = axes.size(); i-- > 0;) x = all_gather(x, axes[i], dim);
  return x;
}
Tensor scatter_sum_over(Tensor x, const AxisNames& axes, int64_t dim) {
  for (const std::string& axis : axes) x = reduce_scatter(x, axis, dim);
  return x;
}
Tensor index_over(Graph& g, const AxisNames& axes) {
  Tensor index;
  for (const std::string& axis : axes) {
    Tensor i = axis_index(g, axis);
    index = index ? index * static_cast<double>(devices_along(g.options(), {axis})) + i : i;
  }
  return index;
}

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> all;
  for (int64_t d = 1; d <= n; ++d)
    if (n % d == 0) all.push_back(d);
  return all;
}

enum class Method { local, gather, ring, ulysses };

/// Sharding of one call. Batch, heads and queries are sharded; so are keys, unless replicated.
struct Plan {
  DimAxes q, kv, lse;
  AxisNames all, sequence;  // all mesh axes; those that shard the queries
  Method method = Method::local;
  int64_t parts = 1, lq = 0, lk = 0;  // shards of the sequence; unpadded lengths
  int64_t padded_q = 0, padded_k = 0;
  LocalAttention options;
};

Method method_for(const Plan& p, ContextParallelism parallelism, int64_t heads, int64_t heads_here) {
  if (p.parts == 1 || p.lq != p.lk) return Method::local;
  const bool heads_divide = heads_here % p.parts == 0;
  // With n devices and L keys, gathering sends (n − 1) / n · 2 L to each device, all-to-all (n − 1) / n · 4 L / n.
  if (parallelism == ContextParallelism::automatic)
    return p.sequence.size() == 1 && p.parts > 2 && heads_divide ? Method::ulysses : Method::gather;
  if (p.sequence.size() > 1) {
    log_info_once("attention: the sequence is split over {}; keys are gathered", fmt::join(p.sequence, " and "));
    return Method::gather;
  }
  if (parallelism == ContextParallelism::ring || (parallelism == ContextParallelism::ulysses_or_ring && !heads_divide))
    return Method::ring;
  check(heads_divide, Code::invalid_config,
        "Ulysses attention requires the number of heads to be divisible by the context shard count, got heads={} and "
        "context_shards={}{}; use attention=ring, or another ici_context_parallelism",
        heads, p.parts,
        heads_here == heads ? "" : fmt::format(" ({} heads on each device of the other axes)", heads_here));
  return Method::ulysses;
}

Plan plan_for(Tensor q, Tensor k, const AttentionOptions& o, ContextParallelism parallelism, bool in_blocks) {
  const GraphOptions& g = q.graph().options();
  const int64_t devices = g.devices(), heads = q.dim(2);
  Plan p;
  for (const auto& [name, size] : g.mesh_axes)
    if (size > 1) p.all.push_back(name);
  // Resolves the rules for padded sizes, which every mesh axis divides.
  p.q = g.resolve({o.axes.batch, o.axes.length, o.axes.heads, ""},
                  {q.dim(0), round_up(q.dim(1), devices), round_up(heads, devices), q.dim(3)});
  p.q.resize(4);
  p.sequence = p.q[1];
  p.parts = devices_along(g, p.sequence);
  const int64_t shares = devices_along(g, p.q[2]);
  check(heads % shares == 0, Code::invalid_config,
        "ici_{}_parallelism: {} heads do not divide among the {} devices of the mesh axis {}, at {}; {} can share them",
        fmt::join(p.q[2], "_parallelism and ici_"), heads, shares, fmt::join(p.q[2], " and "), q.graph().path(),
        fmt::join(divisors(heads), ", "));
  p.lq = q.dim(1), p.lk = k.dim(1);
  p.padded_q = round_up(p.lq, p.parts);
  p.method = method_for(p, parallelism, heads, heads / shares);
  p.padded_k = p.method == Method::local ? p.lk : p.padded_q;
  p.kv = p.q;
  if (p.method == Method::local) p.kv[1].clear();
  p.lse = {p.q[0], p.q[2], p.q[1]};
  if (p.method == Method::ulysses) {
    p.lse[1].insert(p.lse[1].end(), p.sequence.begin(), p.sequence.end());
    p.lse[2].clear();
  }
  p.options = {.scale = o.scale,
               .precision = o.precision,
               .in_blocks = in_blocks,
               .blocks = o.blocks,
               .causal = o.causal,
               .cudnn = o.cudnn};
  return p;
}

/// Options of one device's queries for the keys from `first_key` on.
LocalAttention local_options(const Plan& p, Graph& g, Tensor first_key) {
  LocalAttention options = p.options;
  const int64_t queries = p.padded_q / p.parts;  // per device
  if (options.causal && p.parts > 1) options.first_query = index_over(g, p.sequence) * static_cast<double>(queries);
  options.first_key = first_key;
  return options;
}

// ---- all keys on every device

Tensor all_keys(const Plan& p, Tensor x) {
  return p.method == Method::gather ? cut(gather_over(x, p.sequence, 1), 1, p.lk) : x;
}

AttentionResult gathered(const Plan& p, Tensor q, Tensor k, Tensor v) {
  return local_attention(q, all_keys(p, k), all_keys(p, v), local_options(p, q.graph(), {}));
}

AttentionGradient gathered_gradient(const Plan& p, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy) {
  AttentionGradient g =
      local_attention_gradient(q, all_keys(p, k), all_keys(p, v), y, lse, dy, local_options(p, q.graph(), {}));
  for (Tensor* d : {&g.k, &g.v})
    *d = p.method == Method::gather ? scatter_sum_over(pad_end(*d, 1, p.padded_k), p.sequence, 1)
                                    : all_reduce_sum(*d, p.sequence);
  return g;
}

// ---- keys in a ring

/// Keys that were passed on by `hop` devices, with their positions if needed.
LocalAttention seen_on_hop(const Plan& p, Tensor hop) {
  const bool pads = p.padded_k != p.lk;
  if (!p.options.causal && !pads && !p.options.lengths) return p.options;
  Graph& g = hop.graph();
  const auto n = static_cast<double>(p.parts);
  Tensor from = rem(index_over(g, p.sequence) - hop + n, scalar_like(hop, n));
  const int64_t keys = p.padded_k / p.parts;     // per device
  if (!p.options.causal && p.options.lengths) {  // every implementation supports lengths
    LocalAttention of_part = p.options;
    Tensor lengths = p.options.lengths;
    if (pads) lengths = minimum(lengths, scalar_like(lengths, static_cast<double>(p.lk)));
    of_part.lengths = lengths - broadcast_to(from * static_cast<double>(keys), lengths.dims());
    return of_part;
  }
  LocalAttention options = local_options(p, g, from * static_cast<double>(keys));
  if (pads) options.keys = p.lk;
  return options;
}

/// [B, H, L] → [B, L, H, 1].
Tensor as_column(Tensor rows) { return expand_dims(transpose(rows, {0, 2, 1}), -1); }

/// The plan with the lengths among a device's inputs; padding of keys is expressed as lengths too.
Plan with_lengths(const Plan& p, const std::vector<Tensor>& in, size_t others) {
  Plan with_lengths_input = p;
  if (in.size() > others) with_lengths_input.options.lengths = in[others];
  return with_lengths_input;
}

Tensor passed_on(const Plan& p, Tensor x) { return collective_permute(x, p.sequence[0], 1); }

AttentionResult ring(const Plan& p, Tensor q, Tensor k, Tensor v) {
  const DType type = attention_sum_type(q.dtype());
  Graph& g = q.graph();
  Tensor none = full(g, -1e30, {type, {q.dim(0), q.dim(2), q.dim(1)}});
  const auto out =
      scan(p.parts, {k, v, full(g, 0, {type, q.dims()}), none}, [&](ScanStep& step, const std::vector<Tensor>& c) {
        Tensor next_k = passed_on(p, c[0]), next_v = passed_on(p, c[1]);
        const AttentionResult part = local_attention(step.body().capture(q), c[0], c[1], seen_on_hop(p, step.index()));
        const AttentionResult sum = merge_attention({c[2], c[3]}, part, as_column);
        return ScanResult{{next_k, next_v, sum.y, sum.lse}, {}};
      }).carry;
  return {out[2], out[3]};
}

AttentionGradient ring_gradient(const Plan& p, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy) {
  const DType type = attention_sum_type(q.dtype());
  Tensor none = full(q.graph(), 0, {type, q.dims()}), no_keys = full(q.graph(), 0, {type, k.dims()});
  const auto out = scan(p.parts, {k, v, no_keys, no_keys, none}, [&](ScanStep& step, const std::vector<Tensor>& c) {
                     Tensor next_k = passed_on(p, c[0]), next_v = passed_on(p, c[1]);
                     auto captured = [&](Tensor x) { return step.body().capture(x); };
                     const AttentionGradient part =
                         local_attention_gradient(captured(q), c[0], c[1], captured(y), captured(lse), captured(dy),
                                                  seen_on_hop(p, step.index()));
                     return ScanResult{{next_k, next_v, passed_on(p, c[2] + cast(part.k, type)),
                                        passed_on(p, c[3] + cast(part.v, type)), c[4] + cast(part.q, type)},
                                       {}};
                   }).carry;
  return {out[4], out[2], out[3]};
}

// ---- Ulysses

/// [B, L/n, H, D] → [B, L, H/n, D], without padding.
Tensor whole_sequence(const Plan& p, Tensor x, int64_t length) {
  return cut(all_to_all(x, p.sequence[0], 2, 1), 1, length);
}
Tensor whole_heads(const Plan& p, Tensor x, int64_t padded_length) {
  return all_to_all(pad_end(x, 1, padded_length), p.sequence[0], 1, 2);
}

AttentionResult ulysses_attention(const Plan& p, Tensor q, Tensor k, Tensor v) {
  AttentionResult r =
      local_attention(whole_sequence(p, q, p.lq), whole_sequence(p, k, p.lk), whole_sequence(p, v, p.lk), p.options);
  return {whole_heads(p, cast(r.y, q.dtype()), p.padded_q), r.lse};
}

AttentionGradient ulysses_gradient(const Plan& p, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy) {
  auto whole = [&](Tensor x, int64_t length) { return whole_sequence(p, x, length); };
  const AttentionGradient g = local_attention_gradient(whole(q, p.lq), whole(k, p.lk), whole(v, p.lk), whole(y, p.lq),
                                                       lse, whole(dy, p.lq), p.options);
  auto back = [&](Tensor x, int64_t length) { return whole_heads(p, cast(x, q.dtype()), length); };
  return {back(g.q, p.padded_q), back(g.k, p.padded_k), back(g.v, p.padded_k)};
}

}  // namespace

const char* mesh_attention_refuses(Tensor q, const AttentionOptions& options) {
  const GraphOptions& g = q.graph().options();
  if (g.one_device()) return "there is one device";
  if (!g.resolve || options.axes.batch.empty()) return "the model sets no logical axes of attention";
  if (options.key_segments) return "there are segments";
  return options.bias ? "there is a bias" : nullptr;
}

Tensor mesh_attention(Tensor q, Tensor k, Tensor v, const AttentionOptions& options, ContextParallelism parallelism,
                      bool in_blocks) {
  const Plan p = plan_for(q, k, options, parallelism, in_blocks);
  // Grouped heads are not repeated if each device has whole groups.
  const int64_t shares =
      devices_along(q.graph().options(), p.q[2]) * (p.method == Method::ulysses ? p.parts : int64_t{1});
  if (k.dim(2) % shares != 0) {
    const int64_t group = q.dim(2) / k.dim(2);
    k = repeated_heads(k, group), v = repeated_heads(v, group);
  }
  const DType type = q.dtype();
  auto forward = [p, type](const std::vector<Tensor>& in) {
    std::vector<DimAxes> axes = {p.q, p.kv, p.kv};
    if (in.size() > axes.size()) axes.push_back({p.q[0]});
    return manual_computation(in, axes, {p.q, p.lse}, p.all, [&](const std::vector<Tensor>& x) {
      const Plan plan = with_lengths(p, x, 3);
      const AttentionResult r = p.method == Method::ring      ? ring(plan, x[0], x[1], x[2])
                                : p.method == Method::ulysses ? ulysses_attention(plan, x[0], x[1], x[2])
                                                              : gathered(plan, x[0], x[1], x[2]);
      return std::vector<Tensor>{cast(r.y, type), r.lse};
    });
  };
  auto gradient = [p, type](const std::vector<Tensor>& in, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
    std::vector<Tensor> read = {in[0], in[1], in[2], out[0], out[1], dys[0]};
    std::vector<DimAxes> axes = {p.q, p.kv, p.kv, p.q, p.lse, p.q};
    if (in.size() > 3) read.push_back(in[3]), axes.push_back({p.q[0]});
    Grads grads = manual_computation(read, axes, {p.q, p.kv, p.kv}, p.all, [&](const std::vector<Tensor>& x) {
      const Plan plan = with_lengths(p, x, 6);
      const AttentionGradient g = p.method == Method::ring ? ring_gradient(plan, x[0], x[1], x[2], x[3], x[4], x[5])
                                  : p.method == Method::ulysses
                                      ? ulysses_gradient(plan, x[0], x[1], x[2], x[3], x[4], x[5])
                                      : gathered_gradient(plan, x[0], x[1], x[2], x[3], x[4], x[5]);
      return std::vector<Tensor>{cast(g.q, type), cast(g.k, type), cast(g.v, type)};
    });
    grads.resize(in.size());
    return grads;
  };
  std::vector<Tensor> in = {pad_end(q, 1, p.padded_q), pad_end(k, 1, p.padded_k), pad_end(v, 1, p.padded_k)};
  if (options.lengths) in.push_back(options.lengths);
  return cut(custom_vjp(in, forward, gradient)[0], 1, p.lq);
}

}  // namespace md
