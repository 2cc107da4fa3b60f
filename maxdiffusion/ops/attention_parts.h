// Attention as two functions, the result and its gradient, which share only the result and the log-sum-exp of each row.
// Attention over several devices combines them (attention_mesh.h). Sources: Dao et al. 2022 (FlashAttention),
// algorithms 1 and 2; Liu et al. 2023 (ring attention).
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/dot.h"

namespace md {

/// How block sizes are measured on the device before a program is compiled (ops/attention_search.h).
struct BlockSearch {
  bool full = false;   // all multiples of 256 instead of few
  int64_t runs = 10;   // timed runs of each combination
  std::string folder;  // of the CSV files with all timings; empty: none
};

/// Block sizes of queries and keys. 0: a default; for the gradient, the forward size. All 0: on some TPUs the defaults
/// of a table (attention.cc). Attention composed of operations uses only the first four.
struct AttentionBlocks {
  int64_t queries = 0, keys = 0, gradient_queries = 0, gradient_keys = 0;
  // Kernels only: keys whose logits are computed at a time, forward and in the gradient; blocks of the gradient of q,
  // if it is a separate kernel.
  int64_t keys_compute = 0, gradient_keys_compute = 0, dq_queries = 0, dq_keys = 0;
  // Whether one kernel computes all gradients, with five products per block instead of seven; automatic: if it fits in
  // fast memory.
  enum class Fused { automatic, no, yes } fused_gradient = Fused::automatic;
  std::shared_ptr<const BlockSearch> search = {};  // kernels of TPUs: sizes that are 0 are measured; null: defaults
  bool operator==(const AttentionBlocks&) const = default;
};

/// The sizes that MaxDiffusion's documentation gives for this device kind; all 0: none.
AttentionBlocks blocks_of_chip(const std::string& device_kind);

/// q [B, Lq, H, D], k and v [B, Lk, H / G, D] of one device: head h of q uses head h / G of theirs.
struct LocalAttention {
  double scale = 1;
  Precision precision = Precision::default_;
  /// true: stores no logits, by head and block. false: all logits at once.
  bool in_blocks = true;
  AttentionBlocks blocks = {};
  bool causal = false;
  bool cudnn = true;  // false: cuDNN is not used where it could be
  Tensor bias = {};   // added to the logits, broadcast to [B, H, Lq, Lk]; only with in_blocks=false, and differentiated
                      // by autodiff
  /// Global positions of the first query and the first key, s32; absent: 0.
  Tensor first_query = {}, first_key = {};
  /// Keys from this position on are padding; -1: none.
  int64_t keys = -1;
  /// s32 [B]: keys at this position and later are padding, counted from the same origin as first_key; absent: none. May
  /// be 0 or less: the sample attends to no key.
  Tensor lengths = {};
  Tensor key_bias = {};  // f32 [B, Lk]: added to the logits of a key, for all queries and heads
  /// s32 [B, Lq] and [B, Lk]: queries attend to the keys of their segment. Absent: to all keys.
  Tensor query_segments = {}, key_segments = {};
};

struct AttentionResult {
  Tensor y;    // like q; or f32 (f64 for f64), the type of the sum
  Tensor lse;  // f32 (f64) [B, H, Lq]: log-sum-exp of each row
};
/// Combines the results of two parts of the keys. `broadcast` expands lse to the shape of y. y is f32 (f64).
AttentionResult merge_attention(const AttentionResult& a, const AttentionResult& b, Tensor (*broadcast)(Tensor lse));

/// Attention over this part of the keys. A query without keys gets a finite y, and an lse so small that merge_attention
/// ignores it.
AttentionResult local_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& options);

/// Gradients of q, k, v and key_bias, in f32 (f64) or in q's type, from this part of the keys. y and lse are the
/// results over all keys.
struct AttentionGradient {
  Tensor q, k, v;
  Tensor key_bias = {};  // f32 (f64) [B, Lk]; empty without key_bias
};
AttentionGradient local_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                           const LocalAttention& options);

/// Repeats each head `times` times in succession: [B, L, H, D] → [B, L, times · H, D].
Tensor repeated_heads(Tensor x, int64_t times);

/// FLOPs of `products` matrix products of the size of q·kᵀ; q and k are the first inputs of the node.
double attention_flops(const Node& n, double products);

/// Accumulation type: f64 for f64, else f32.
DType attention_sum_type(DType type);

}  // namespace md
