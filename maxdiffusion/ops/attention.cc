// Layout of composed operations: logits are made from [B, H, L, D], batch axes leading, after an explicit transpose. On
// XLA's CPU (two busy cores, processor time of forward and backward, ms, f32) against dots with batch axes {0, 2} in
// place: 1.4 for 1.6 at B=16 H=4 L=64 D=32, 41 for 46 at L=256, 117 for 115 at B=2 H=4 L=1024 D=64. Dividing by the sum
// after the product with v instead of before saves a pass over the logits and a third of the memory (71 MB for 103 MB
// at L=1024). Head by head ("flash") the logits stay in the cache: 97 ms and 22 MB at L=1024, 30 ms for 41 ms at L=256,
// but 2.4 ms for 1.4 ms at L=64.
#include "maxdiffusion/ops/attention.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/attention_mesh.h"
#include "maxdiffusion/ops/attention_parts.h"
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
  bool flash;  // keep no logits
  ContextParallelism parallelism = ContextParallelism::automatic;
};
constexpr KernelName kNames[] = {
    {"dot_product", false},
    {"flash", true},
    {"ring", true, ContextParallelism::ring},
    {"ulysses", true, ContextParallelism::ulysses},
    {"ulysses_ring", true, ContextParallelism::ulysses_or_ring},
    // The reference's names for other programs of the same exact attention.
    {"tokamax_flash", true},
    {"cudnn_flash_te", true},
    {"tokamax_ring", true, ContextParallelism::ring},
    {"tokamax_ring_custom", true, ContextParallelism::ring},
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

// Blocks on chips that MaxDiffusion's documents name sizes for, where a run names none.
struct ChipBlocks {
  std::string_view kind;
  AttentionBlocks blocks;
};
constexpr AttentionBlocks kTrillium{3024, 2048, 3024, 2048, 1024, 1024, 3024, 2048},
    kV5p{3024, 2048, 1024, 3072, 1024, 256, 1024, 3072};
constexpr ChipBlocks kChipBlocks[] = {{"TPU v6 lite", kTrillium},
                                      {"TPU v6e", kTrillium},
                                      {"TPU v5p", kV5p},
                                      {"TPU v5", kV5p}};  // which is v5p's own name

AttentionBlocks blocks_of_chip(const std::string& kind) {
  for (const ChipBlocks& chip : kChipBlocks)
    if (kind == chip.kind) return chip.blocks;
  return {};
}

// Logits of a CPU without kernels of ours (another plugin, float16) are stored up to this: more comes in blocks,
// whatever is requested, since the memory of a CPU's devices is the machine's.
constexpr int64_t kMostLogitsOnCpu = int64_t{256} << 20;

struct AttentionCall {
  Tensor q, k, v;
  const AttentionOptions& options;
  const KernelName& requested;

  bool is_long() const { return std::min(q.dim(1), k.dim(1)) >= options.flash_min_seq_length; }
  bool stores_too_much() const {
    return q.graph().options().platform == Platform::cpu &&
           q.dim(0) * q.dim(2) * q.dim(1) * k.dim(1) > kMostLogitsOnCpu / 4;
  }
  LocalAttention how(bool in_blocks) const {
    return {.scale = options.scale,
            .precision = options.precision,
            .in_blocks = in_blocks,
            .blocks = options.blocks,
            .causal = options.causal,
            .lengths = options.lengths};
  }
};
using AttentionRow = KernelRow<AttentionCall, Tensor>;

const char* mesh_refuses(const AttentionCall& c) { return mesh_attention_refuses(c.q, c.options); }

const char* cpu_kernel_refuses(const AttentionCall& c) {
  if (c.options.bias) return "there is a bias";
  return kernels_support({c.q, c.k, c.v}) ? nullptr : kNotForCpuKernels;
}

const char* flash_refuses(const AttentionCall& c) {
  if (!c.requested.flash && !c.stores_too_much()) return "it is not requested";
  if (c.options.bias) return "there is a bias";
  if (!c.q.graph().options().one_device()) return "the model sets no logical axes of attention";
  return c.is_long() ? nullptr : "a length is below flash_min_seq_length";
}

Tensor with_its_gradient(const AttentionCall& c, bool in_blocks) {
  std::vector<Tensor> in = {c.q, c.k, c.v};
  if (c.options.lengths) in.push_back(c.options.lengths);
  const auto with_lengths = [how = c.how(in_blocks)](const std::vector<Tensor>& x) {
    LocalAttention local = how;
    if (local.lengths) local.lengths = x[3];
    return local;
  };
  return custom_vjp(
      in,
      [with_lengths](const std::vector<Tensor>& x) {
        const AttentionResult r = local_attention(x[0], x[1], x[2], with_lengths(x));
        return std::vector<Tensor>{cast(r.y, x[0].dtype()), r.lse};
      },
      [with_lengths](const std::vector<Tensor>& x, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
        const AttentionGradient g = local_attention_gradient(x[0], x[1], x[2], out[0], out[1], dys[0], with_lengths(x));
        const DType type = x[0].dtype();
        Grads grads = {cast(g.q, type), cast(g.k, type), cast(g.v, type)};
        grads.resize(x.size());
        return grads;
      })[0];
}

Tensor flash(const AttentionCall& c) { return with_its_gradient(c, true); }

/// With a bias: by autodiff, which has a gradient of the bias and stores the logits.
Tensor dot_product(const AttentionCall& c) {
  if (!c.options.bias) return with_its_gradient(c, false);
  LocalAttention how = c.how(false);
  how.bias = c.options.bias;
  while (how.bias.rank() < 4) how.bias = expand_dims(how.bias, 0);
  return cast(local_attention(c.q, c.k, c.v, how).y, c.q.dtype());
}

/// Each head `times` times, one after the other: [B, L, H, D] → [B, L, times · H, D].
Tensor repeated_heads(Tensor x, int64_t times) {
  const Dims& d = x.dims();
  return reshape(broadcast_to(expand_dims(x, 3), {d[0], d[1], d[2], times, d[3]}), {d[0], d[1], d[2] * times, d[3]});
}

constexpr AttentionRow kKernels[] = {
    {"attention by device", mesh_refuses,
     [](const AttentionCall& c) {
       return mesh_attention(c.q, c.k, c.v, c.options, c.requested.parallelism, c.requested.flash && c.is_long());
     }},
    {kAttentionKernel, cpu_kernel_refuses,
     [](const AttentionCall& c) { return local_attention(c.q, c.k, c.v, c.how(true)).y; }},
    {"flash", flash_refuses, flash},
    {"dot_product", never, dot_product},
};

}  // namespace

void check_attention_kernel(const std::string& name) { kernel_named(name); }

Tensor attention(Tensor q, Tensor k, Tensor v, AttentionOptions options) {
  const KernelName& requested = kernel_named(options.kernel);
  check(q.rank() == 4 && k.rank() == 4 && k.shape() == v.shape() && q.dim(0) == k.dim(0) &&
            (q.dim(2) == k.dim(2) || (k.dim(2) > 0 && q.dim(2) % k.dim(2) == 0)) && q.dim(3) == k.dim(3) &&
            q.dtype() == k.dtype(),
        Code::invalid_graph, "attention: q {}, k {}, v {} are not [B, Lq, H, D] and [B, Lk, H / G, D]",
        to_string(q.shape()), to_string(k.shape()), to_string(v.shape()));
  check(!options.lengths || options.lengths.shape() == Shape{DType::s32, {q.dim(0)}}, Code::invalid_graph,
        "attention: lengths are {}, expected s32 [{}]", options.lengths ? to_string(options.lengths.shape()) : "",
        q.dim(0));
  if (q.dim(2) != k.dim(2)) {
    const int64_t group = q.dim(2) / k.dim(2);
    k = repeated_heads(k, group), v = repeated_heads(v, group);
  }
  if (options.blocks == AttentionBlocks()) options.blocks = blocks_of_chip(q.graph().options().device_kind);
  if (options.scale == 0) options.scale = 1 / std::sqrt(static_cast<double>(q.dim(3)));
  const AttentionCall call{q, k, v, options, requested};
  const AttentionRow& row = kernel_for(kKernels, call);
  if (requested.flash && &row == std::end(kKernels) - 1)
    log_info_once("attention={}: {} is used where {}", options.kernel, row.name, flash_refuses(call));
  else if (requested.parallelism != ContextParallelism::automatic && &row != kKernels)
    log_info_once("attention={}: {} is used where {}", options.kernel, row.name, mesh_refuses(call));
  return row.build(call);
}

}  // namespace md
