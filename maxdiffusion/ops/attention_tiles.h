// Attention as custom kernels for TPUs and NVIDIA GPUs, written as tile programs: logits are computed in blocks of fast
// memory and never stored. On CPUs the same programs run as StableHLO, for tests. Sources: Rabe and Staats 2021, Dao et
// al. 2022 and 2023 (online softmax, log-sum-exp, the gradient from it).
#pragma once

#include "maxdiffusion/ops/attention_parts.h"
#include "maxdiffusion/tiles/program.h"

namespace md {

/// Properties of a device that kernels depend on.
struct TileChip {
  int64_t matrix = 128;                     // rows and columns of a TPU's matrix unit
  int64_t fast_memory = int64_t{16} << 20;  // bytes that a kernel may use
  int64_t lanes = 128;                      // columns of a register; statistics of rows are stored this often
  bool is_gpu = false;                      // blocks and heads are powers of two; block sizes are ours
};
/// Properties of a device kind, as named by the plugin; for unknown kinds those common to all TPUs. Names that start
/// with NVIDIA: of GPUs.
TileChip tile_chip(const std::string& kind);
/// Values of a head in a kernel: on GPUs the next power of two.
int64_t tile_head_dim(int64_t head_dim, const TileChip& chip);

/// One kernel call: sizes on one device, lengths before padding to whole blocks, heads of tile_head_dim() values.
struct TileAttention {
  int64_t batch = 1, heads = 1, kv_heads = 1, queries = 0, keys = 0, head_dim = 0;
  DType type = DType::bf16;
  double scale = 1;
  bool causal = false;
  bool exact = false;    // products of f32 inputs are computed in f32
  bool limited = false;  // lengths and positions are scalar inputs: the first query's position minus the first key's,
                         // then each sample's number of keys
  bool key_bias = false, segments = false;  // whether these arrays are inputs
  bool part_of_queries = false;             // others give keys gradients too: dk and dv are f32
  bool adds_to_keys = false;                // dk and dv include those of earlier parts, which are inputs
  AttentionBlocks blocks = {};
  TileChip chip = {};
};
/// `blocks` with unset sizes filled in; all blocks of queries have one size, and blocks of keys are no longer than the
/// keys. Throws invalid_config, with key, value, limit and the nearest valid value, for sizes that no kernel supports.
AttentionBlocks tile_blocks(const TileAttention& a);

/// Inputs, each if present: scalars (`limited`), q, k, v, key_bias as rows, segments of queries as columns, segments of
/// keys as rows. Results: y, log-sum-exp [B, H, blocks of queries, 1, block]. Rows are [B, blocks, 1, block]; columns
/// are [B, length, lanes], repeated along the last axis. key_bias is multiplied by log2(e), or divided by the scale:
/// tile_bias_factor().
tiles::Program tile_attention_program(const TileAttention& a);
double tile_bias_factor(const TileAttention& a);

enum class TileGradient { fused, dq, dkv };
/// Inputs, each if present: scalars (`limited`), q, k, v, dy; log-sum-exp, times log2(e), and Σ y · dy of each row, as
/// [B, H, blocks of queries, 1, block]; key_bias as columns, times log2(e); segments of queries as rows, segments of
/// keys as columns; dk and dv of earlier parts (`adds_to_keys`), as they are results. Results: dq (fused, dq); dk and
/// dv of each head of q, and the gradient of key_bias for each head as rows [B, H, blocks of keys, 1, block] (fused,
/// dkv).
tiles::Program tile_gradient_program(const TileAttention& a, TileGradient kind);

/// Whether kernels are compiled for this device: a TPU, or an NVIDIA GPU from Ampere on.
bool has_tile_kernels(const GraphOptions& device);
/// Why no kernel supports these arrays; null if one does.
const char* tile_attention_refuses(Tensor q, Tensor k, Tensor v, const LocalAttention& options);
/// Like local_attention(); k and v may have fewer heads (grouped-query attention).
AttentionResult tile_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& options);
AttentionGradient tile_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                          const LocalAttention& options);

}  // namespace md
