// Layout of composed operations: logits are made from [B, H, L, D], batch axes leading, after an explicit transpose. On
// XLA's CPU (two busy cores, processor time of forward and backward, ms, f32) against dots with batch axes {0, 2} in
// place: 1.4 for 1.6 at B=16 H=4 L=64 D=32, 41 for 46 at L=256, 117 for 115 at B=2 H=4 L=1024 D=64. Dividing by the sum
// after the product with v instead of before saves a pass over the logits and a third of the memory (71 MB for 103 MB
// at L=1024). Head by head ("flash") the logits stay in the cache: 97 ms and 22 MB at L=1024, 30 ms for 41 ms at L=256,
// but 2.4 ms for 1.4 ms at L=64.
#include "maxdiffusion/ops/attention.h"

#include <fmt/format.h>

#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
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

DType wide(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

/// q [..., Lq, D], k and v [..., Lk, D], bias broadcastable to the logits → [..., Lq, D]. `first` is the position of
/// the first query among all (absent: 0), for the causal mask.
Tensor from_logits(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor first, const AttentionOptions& o) {
  const DType type = wide(q.dtype());
  const int64_t rank = q.rank();
  Axes batch;
  for (int64_t i = 0; i + 2 < rank; ++i) batch.push_back(i);
  const bool exact = q.dtype() == type;  // scaling bf16 queries would round them once more
  Tensor s = dot(exact ? q * o.scale : q, k, {{rank - 1}, {rank - 1}, batch, batch, o.precision}, type);
  if (!exact) s = s * o.scale;
  if (bias) s = s + cast(bias, type);
  if (o.causal) {
    const Shape positions{DType::s32, {s.dim(-2), s.dim(-1)}};
    Tensor query = iota(s.graph(), positions, 0), key = iota(s.graph(), positions, 1);
    if (first) query = query + first;
    s = where(broadcast_to(le(key, query), s.dims()), s, scalar_like(s, -1e30));
  }
  Tensor e = exp(s - stop_gradient(max(s, {-1}, true)));
  Tensor y = dot(cast(e, v.dtype()), v, {{rank - 1}, {rank - 2}, batch, batch, o.precision}, type);
  return cast(y / sum(e, {-1}, true), q.dtype());
}

Tensor heads_first(Tensor x) { return transpose(x, {0, 2, 1, 3}); }

Tensor dot_product(Tensor q, Tensor k, Tensor v, const AttentionOptions& o) {
  Tensor bias = o.bias;
  while (bias && bias.rank() < 4) bias = expand_dims(bias, 0);
  return heads_first(from_logits(heads_first(q), heads_first(k), heads_first(v), bias, {}, o));
}

/// Rows of q per block: the largest divisor of their number up to 1024.
int64_t query_block(int64_t length) {
  int64_t block = std::min<int64_t>(length, 1024);
  while (length % block != 0) --block;
  return block;
}

Tensor flash(Tensor q, Tensor k, Tensor v, const AttentionOptions& o) {
  const int64_t batch = q.dim(0), length = q.dim(1), heads = q.dim(2), d = q.dim(3);
  const int64_t block = query_block(length), blocks = length / block;
  auto per_head = [&](Tensor x, Dims inner) {
    inner.insert(inner.begin(), batch * heads);
    return reshape(heads_first(x), std::move(inner));
  };
  Tensor queries = per_head(q, {blocks, block, d}), keys = per_head(k, {k.dim(1), d}),
         values = per_head(v, {v.dim(1), d});
  // A scan needs a carry; these have nothing to carry.
  auto rows = [](int64_t n, Tensor like, const std::function<Tensor(ScanStep&)>& body) {
    return scan(n, {constant(like.graph(), 0)},
                [&](ScanStep& step, const std::vector<Tensor>& nothing) {
                  return ScanResult{nothing, {body(step)}};
                })
        .stacked[0];
  };
  Tensor y = rows(batch * heads, queries, [&](ScanStep& head) {
    Tensor of_head = head.slice(queries), kh = head.slice(keys), vh = head.slice(values);
    return rows(blocks, of_head, [&](ScanStep& step) {
      Tensor qb = step.slice(of_head);
      RematScope again(step.body(), [](const Node&) { return Keep::recompute; });
      return from_logits(qb, kh, vh, {}, step.index() * static_cast<double>(block), o);
    });
  });
  return heads_first(reshape(y, {batch, heads, length, d}));
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

struct AttentionCall {
  Tensor q, k, v;
  const AttentionOptions& options;
  bool flash;  // what options.kernel asks for
};
using AttentionRow = KernelRow<AttentionCall, Tensor>;

const char* cpu_kernel_refuses(const AttentionCall& c) {
  if (c.options.bias) return "there is a bias";
  return kernels_take({c.q, c.k, c.v}) ? nullptr : kNotForCpuKernels;
}

const char* flash_refuses(const AttentionCall& c) {
  if (!c.flash) return "it is not asked for";
  if (c.options.bias) return "there is a bias";
  if (c.q.graph().options().devices() > 1) return "the mesh has several devices";
  return std::min(c.q.dim(1), c.k.dim(1)) < c.options.flash_min_seq_length ? "a length is below flash_min_seq_length"
                                                                           : nullptr;
}

constexpr AttentionRow kKernels[] = {
    {kAttentionKernel, cpu_kernel_refuses,
     [](const AttentionCall& c) {
       return apply_multi(kAttention, {c.q, c.k, c.v}, KernelOptions{c.options.scale, c.options.causal})[0];
     }},
    {"flash", flash_refuses, [](const AttentionCall& c) { return flash(c.q, c.k, c.v, c.options); }},
    {"dot_product", never, [](const AttentionCall& c) { return dot_product(c.q, c.k, c.v, c.options); }},
};

// The names that the key `attention` takes, and whether each asks for what keeps no logits.
struct KernelName {
  const char* name;
  bool flash;
};
constexpr KernelName kNames[] = {
    {"dot_product", false},
    {"flash", true},
    {"tokamax_flash", true},  // the reference's names for other programs of the same exact attention
    {"cudnn_flash_te", true},
};

const KernelName& kernel_named(const std::string& name) {
  std::string known;
  for (const KernelName& candidate : kNames) {
    if (name == candidate.name) return candidate;
    known += (known.empty() ? "" : ", ") + std::string(candidate.name);
  }
  fail(Code::invalid_config, "attention: '{}' is not one of: {}", name, known);
}

}  // namespace

void check_attention_kernel(const std::string& name) { kernel_named(name); }

Tensor attention(Tensor q, Tensor k, Tensor v, AttentionOptions options) {
  const bool asks_flash = kernel_named(options.kernel).flash;
  check(q.rank() == 4 && k.rank() == 4 && k.shape() == v.shape() && q.dim(0) == k.dim(0) && q.dim(2) == k.dim(2) &&
            q.dim(3) == k.dim(3) && q.dtype() == k.dtype(),
        Code::invalid_graph, "attention: q {}, k {}, v {} are not [B, Lq, H, D] and [B, Lk, H, D]",
        to_string(q.shape()), to_string(k.shape()), to_string(v.shape()));
  if (options.scale == 0) options.scale = 1 / std::sqrt(static_cast<double>(q.dim(3)));
  const AttentionCall call{q, k, v, options, asks_flash};
  const AttentionRow& row = kernel_for(kKernels, call);
  if (asks_flash && &row == std::end(kKernels) - 1)
    log_info_once("attention={}: {} is used where {}", options.kernel, row.name, flash_refuses(call));
  return row.build(call);
}

OpList attention_ops() { return {&kAttention, &kAttentionGrad}; }

}  // namespace md
