// Layout of the composed operations: logits are computed from [B, H, L, D] with leading batch axes, after an explicit
// transpose. Measured on XLA's CPU (two busy cores, processor time of forward and backward, ms, f32), compared with
// dots whose batch axes {0, 2} stay in place: 1.4 and 1.6 at B=16 H=4 L=64 D=32, 41 and 46 at L=256, 117 and 115 at B=2
// H=4 L=1024 D=64. Dividing by the sum after the product with v instead of before saves a pass over the logits and a
// third of the memory (71 and 103 MB at L=1024). Head by head ("flash") the logits stay in the cache: 97 ms and 22 MB
// at L=1024, 30 instead of 41 ms at L=256, but 2.4 instead of 1.4 ms at L=64.
#include "maxdiffusion/ops/attention.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/attention_mesh.h"
#include "maxdiffusion/ops/attention_parts.h"
#include "maxdiffusion/ops/attention_tiles.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/custom_vjp.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/kernel_table.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

// ---- the table

// The values of the key `attention`.
struct KernelName {
  const char* name;
  bool flash;  // stores no logits
  ContextParallelism parallelism = ContextParallelism::automatic;
  bool cudnn = true;  // on NVIDIA GPUs; false: this program's kernels
};
constexpr KernelName kNames[] = {
    {"dot_product", false},
    {"flash", true},
    {"ring", true, ContextParallelism::ring},
    {"ulysses", true, ContextParallelism::ulysses},
    {"ulysses_ring", true, ContextParallelism::ulysses_or_ring},
    // MaxDiffusion's names for other implementations of the same exact attention.
    {"tokamax_flash", true, ContextParallelism::automatic, false},
    {"cudnn_flash_te", true},
    {"tokamax_ring", true, ContextParallelism::ring, false},
    {"tokamax_ring_custom", true, ContextParallelism::ring, false},
    {"ulysses_custom", true, ContextParallelism::ulysses},
    {"ulysses_custom_fixed_m", true, ContextParallelism::ulysses},
    {"ulysses_ring_custom", true, ContextParallelism::ulysses_or_ring},
    {"ulysses_ring_custom_bidir", true, ContextParallelism::ulysses_or_ring},
    {"ulysses_ring_custom_fixed_m", true, ContextParallelism::ulysses_or_ring},
};

const KernelName& kernel_named(const std::string& name) {
  std::vector<std::string> known;
  for (const KernelName& candidate : kNames) {
    if (name == candidate.name) return candidate;
    known.emplace_back(candidate.name);
  }
  fail(Code::invalid_config, "attention is '{}'; expected one of: {}", name, nearest_first(name, known));
}

// Default block sizes, for chips whose sizes MaxDiffusion's documentation gives.
struct ChipBlocks {
  std::string_view kind;
  AttentionBlocks blocks;
};
const AttentionBlocks kTrillium{3024, 2048, 3024, 2048, 1024, 1024, 3024, 2048},
    kV5p{3024, 2048, 1024, 3072, 1024, 256, 1024, 3072};
const ChipBlocks kChipBlocks[] = {{"TPU v6 lite", kTrillium},
                                  {"TPU v6e", kTrillium},
                                  {"TPU v5p", kV5p},
                                  {"TPU v5", kV5p}};  // the name that v5p reports

}  // namespace

AttentionBlocks blocks_of_chip(const std::string& kind) {
  for (const ChipBlocks& chip : kChipBlocks)
    if (kind == chip.kind) return chip.blocks;
  return {};
}

namespace {

// Largest size in bytes of stored logits on CPUs without this project's kernels (another plugin, float16). Larger ones
// are computed in blocks, whatever is requested, because all CPU devices share the machine's memory.
constexpr int64_t kMostLogitsOnCpu = int64_t{256} << 20;

struct AttentionCall {
  Tensor q, k, v;
  const AttentionOptions& options;
  const KernelName& requested;
  Tensor key_bias;  // [B, Lk]: options.bias if it only depends on the key

  bool is_long() const { return std::min(q.dim(1), k.dim(1)) >= options.flash_min_seq_length; }
  bool stores_too_much() const {
    double logits = 1;  // not a whole number: sizes of a damaged config may be any
    for (const int64_t size : {q.dim(0), q.dim(2), q.dim(1), k.dim(1)}) logits *= static_cast<double>(size);
    return q.graph().options().platform == Platform::cpu && logits > static_cast<double>(kMostLogitsOnCpu) / 4;
  }
  LocalAttention local_options(bool in_blocks) const {
    return {.scale = options.scale,
            .precision = options.precision,
            .in_blocks = in_blocks,
            .blocks = options.blocks,
            .causal = options.causal,
            .cudnn = options.cudnn,
            .lengths = options.lengths,
            .key_bias = in_blocks ? key_bias : Tensor(),
            .query_segments = options.query_segments,
            .key_segments = options.key_segments};
  }
};

/// The bias as f32 [B, Lk] if it is equal for all queries and heads; else absent.
Tensor bias_of_keys(Tensor bias, int64_t batch, int64_t keys) {
  if (!bias || bias.dim(-1) != keys) return {};
  const int64_t samples = bias.rank() == 4 ? bias.dim(0) : 1;
  if (bias.shape().elements() != samples * keys) return {};
  return broadcast_to(cast(reshape(bias, {samples, keys}), DType::f32), {batch, keys});
}

using AttentionRow = KernelRow<AttentionCall, Tensor>;

const char* mesh_refuses(const AttentionCall& c) { return mesh_attention_refuses(c.q, c.options); }

const char* cpu_kernel_refuses(const AttentionCall& c) {
  if (c.options.bias) return "there is a bias";
  if (c.options.key_segments) return "there are segments";
  return kernels_support({c.q, c.k, c.v}) ? nullptr : kNotForCpuKernels;
}

const char* flash_refuses(const AttentionCall& c) {
  if (!c.requested.flash && !c.stores_too_much()) return "it is not requested";
  if (c.options.bias && !c.key_bias) return "there is a bias";
  if ((c.key_bias || c.options.key_segments) && tile_attention_refuses(c.q, c.k, c.v, c.local_options(true)))
    return c.key_bias ? "there is a bias" : "there are segments";
  if (!c.q.graph().options().one_device()) return "the model sets no logical axes of attention";
  return c.is_long() ? nullptr : "a length is below flash_min_seq_length";
}

Tensor with_its_gradient(const AttentionCall& c, bool in_blocks) {
  // Optional inputs follow q, k and v.
  static constexpr Tensor LocalAttention::*kMore[] = {&LocalAttention::key_bias, &LocalAttention::lengths,
                                                      &LocalAttention::query_segments, &LocalAttention::key_segments};
  const LocalAttention options = c.local_options(in_blocks);
  std::vector<Tensor> in = {c.q, c.k, c.v};
  for (const auto member : kMore)
    if (options.*member) in.push_back(options.*member);
  const auto with = [options](const std::vector<Tensor>& x) {
    LocalAttention local = options;
    size_t next = 3;
    for (const auto member : kMore)
      if (local.*member) local.*member = x[next++];
    return local;
  };
  return custom_vjp(
      in,
      [with](const std::vector<Tensor>& x) {
        const AttentionResult r = local_attention(x[0], x[1], x[2], with(x));
        return std::vector<Tensor>{cast(r.y, x[0].dtype()), r.lse};
      },
      [with](const std::vector<Tensor>& x, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
        const AttentionGradient g = local_attention_gradient(x[0], x[1], x[2], out[0], out[1], dys[0], with(x));
        const DType type = x[0].dtype();
        Grads grads = {cast(g.q, type), cast(g.k, type), cast(g.v, type)};
        if (g.key_bias) grads.push_back(g.key_bias);
        grads.resize(x.size());
        return grads;
      })[0];
}

Tensor flash(const AttentionCall& c) { return with_its_gradient(c, true); }

/// With a bias, autodiff computes the gradient, including the bias's, and stores the logits.
Tensor dot_product(const AttentionCall& c) {
  if (!c.options.bias) return with_its_gradient(c, false);
  LocalAttention options = c.local_options(false);
  options.bias = c.options.bias;
  while (options.bias.rank() < 4) options.bias = expand_dims(options.bias, 0);
  return cast(local_attention(c.q, c.k, c.v, options).y, c.q.dtype());
}

constexpr AttentionRow kKernels[] = {
    {"attention by device", mesh_refuses,
     [](const AttentionCall& c) {
       return mesh_attention(c.q, c.k, c.v, c.options, c.requested.parallelism, c.requested.flash && c.is_long());
     }},
    {kAttentionKernel, cpu_kernel_refuses,
     [](const AttentionCall& c) { return local_attention(c.q, c.k, c.v, c.local_options(true)).y; }},
    {"flash", flash_refuses, flash},
    {"dot_product", never, dot_product},
};

}  // namespace

void check_attention_kernel(const std::string& name) { kernel_named(name); }

Tensor attention(Tensor q, Tensor k, Tensor v, AttentionOptions options) {
  const KernelName& requested = kernel_named(options.kernel);
  check(q.rank() == 4 && k.rank() == 4 && k.shape() == v.shape() && q.dim(0) == k.dim(0) && k.dim(2) > 0 &&
            q.dim(2) % k.dim(2) == 0 && q.dim(3) == k.dim(3) && q.dtype() == k.dtype(),
        Code::invalid_graph, "attention: q {}, k {}, v {} are not [B, Lq, H, D] and [B, Lk, H / G, D]",
        to_string(q.shape()), to_string(k.shape()), to_string(v.shape()));
  check(!options.lengths || options.lengths.shape() == Shape{DType::s32, {q.dim(0)}}, Code::invalid_graph,
        "attention: lengths are {}, expected s32 [{}]", options.lengths ? to_string(options.lengths.shape()) : "",
        q.dim(0));
  const auto segments_of = [&](Tensor s, Tensor x) {
    return s && s.shape() == Shape{DType::s32, {x.dim(0), x.dim(1)}};
  };
  check((!options.query_segments && !options.key_segments) ||
            (segments_of(options.query_segments, q) && segments_of(options.key_segments, k)),
        Code::invalid_graph, "attention: segments are not s32 [{}, {}] and [{}, {}]", q.dim(0), q.dim(1), k.dim(0),
        k.dim(1));
  options.cudnn = options.cudnn && requested.cudnn;
  if (options.blocks == AttentionBlocks()) options.blocks = blocks_of_chip(q.graph().options().device_kind);
  if (options.scale == 0) options.scale = 1 / std::sqrt(static_cast<double>(q.dim(3)));
  AttentionCall call{q, k, v, options, requested, {}};
  if (has_tile_kernels(q.graph().options()) && requested.flash && call.is_long())
    call.key_bias = bias_of_keys(options.bias, q.dim(0), k.dim(1));
  const AttentionRow& row = kernel_for(kKernels, call);
  if (requested.flash && &row == std::end(kKernels) - 1)
    log_info_once("attention={}: {} is used where {}", options.kernel, row.name, flash_refuses(call));
  else if (requested.parallelism != ContextParallelism::automatic && &row != kKernels)
    log_info_once("attention={}: {} is used where {}", options.kernel, row.name, mesh_refuses(call));
  return row.build(call);
}

}  // namespace md
