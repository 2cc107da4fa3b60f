// Attention as kernels of our own for TPUs, written as tile programs: logits are made in blocks of fast memory and
// never stored. On other devices the same programs run as StableHLO, which tests read. Sources: Rabe and Staats 2021,
// Dao et al. 2022 and 2023 (online softmax, log-sum-exp, the gradient from it).
#pragma once

#include "maxdiffusion/ops/attention_parts.h"
#include "maxdiffusion/tiles/program.h"

namespace md {

/// What kernels have to know of a TPU.
struct TileChip {
  int64_t matrix = 128;                     // rows and columns of a matrix unit
  int64_t fast_memory = int64_t{16} << 20;  // bytes that a kernel may take
};
/// Of a device kind, as the plugin names it; what all TPUs have for others.
TileChip tile_chip(const std::string& kind);

/// One call of the kernels: sizes of a device, lengths as they are before filling up to whole blocks.
struct TileAttention {
  int64_t batch = 1, heads = 1, kv_heads = 1, queries = 0, keys = 0, head_dim = 0;
  DType type = DType::bf16;
  double scale = 1;
  bool causal = false;
  bool exact = false;    // products of f32 in f32
  bool limited = false;  // lengths and positions are given as scalars: the first query's position minus the first
                         // key's, then each sample's number of keys
  AttentionBlocks blocks = {};
  TileChip chip = {};
};
/// `blocks` with the sizes that are not set; blocks of queries of one size, blocks of keys no longer than the keys.
/// Throws invalid_config, with key, value, limit and the nearest valid value, for sizes that no kernel has.
AttentionBlocks tile_blocks(const TileAttention& a);

/// scalars if limited, q, k, v → y, log-sum-exp [B, H, blocks of queries, 1, block].
tiles::Program tile_attention_program(const TileAttention& a);

enum class TileGradient { fused, dq, dkv };
/// scalars if limited, q, k, v, dy, log-sum-exp and Σ y · dy of each row as [B, H, blocks of queries, 1, block], the
/// first times log2(e) → dq (fused, dq), dk, dv of each head of q (fused, dkv).
tiles::Program tile_gradient_program(const TileAttention& a, TileGradient kind);

/// Why there is no kernel for these arrays; null if there is.
const char* tile_attention_refuses(Tensor q, Tensor k, Tensor v, const LocalAttention& how);
/// As local_attention(); k and v may have fewer heads (grouped-query attention).
AttentionResult tile_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& how);
AttentionGradient tile_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                          const LocalAttention& how);

}  // namespace md
