// Attention as two functions, the result and its gradient, which share only the result and the log-sum-exp of each row.
// Attention over several devices combines them (attention_mesh.h). Sources: Dao et al. 2022 (FlashAttention),
// algorithms 1 and 2; Liu et al. 2023 (ring attention).
#pragma once

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/dot.h"

namespace md {

/// Block sizes of queries and keys; 0: a default, for the gradient the size forward. All 0: defaults of a table for
/// some TPUs (attention.cc). Composed blocks read the first four.
struct AttentionBlocks {
  int64_t queries = 0, keys = 0, gradient_queries = 0, gradient_keys = 0;
  // Of kernels: keys whose logits are made at a time, forward and for the gradient; blocks of the gradient of q, where
  // it has a kernel of its own.
  int64_t keys_compute = 0, gradient_keys_compute = 0, dq_queries = 0, dq_keys = 0;
  // Whether one kernel makes all gradients, at five products a block instead of seven; automatic: where its memory
  // fits.
  enum class Fused { automatic, no, yes } fused_gradient = Fused::automatic;
  bool operator==(const AttentionBlocks&) const = default;
};

/// q [B, Lq, H, D], k and v [B, Lk, H, D] of one device.
struct LocalAttention {
  double scale = 1;
  Precision precision = Precision::default_;
  /// true: stores no logits, by head and block. false: all logits at once.
  bool in_blocks = true;
  AttentionBlocks blocks = {};
  bool causal = false;
  Tensor bias = {};  // added to the logits, broadcast to [B, H, Lq, Lk]; only with in_blocks=false, and differentiated
                     // by autodiff
  /// Global positions of the first query and the first key, s32; absent: 0.
  Tensor first_query = {}, first_key = {};
  /// Keys from this position on are padding; -1: none.
  int64_t keys = -1;
  /// s32 [B]: keys of a sample at this position, counted as first_key is, and behind it are padding; absent: none. May
  /// be 0 and less: the sample sees no key.
  Tensor lengths = {};
};

struct AttentionResult {
  Tensor y;    // like q; or f32 (f64 for f64), the type of the sum
  Tensor lse;  // f32 (f64) [B, H, Lq]: log-sum-exp of each row
};
/// Combines the results of two parts of the keys. `broadcast` expands lse to the shape of y. y is f32 (f64).
AttentionResult merge_attention(const AttentionResult& a, const AttentionResult& b, Tensor (*broadcast)(Tensor lse));

/// A query without keys gets a finite y, and an lse so small that merge_attention ignores it.
AttentionResult local_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& how);

/// Gradients of q, k and v, in f32 (f64) or like q, from this part of the keys: y and lse are those of all keys.
struct AttentionGradient {
  Tensor q, k, v;
};
AttentionGradient local_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                           const LocalAttention& how);

/// FLOPs of `products` matrix products of the size of q·kᵀ; q and k are the first inputs of the node.
double attention_flops(const Node& n, double products);

/// Accumulation type: f64 for f64, else f32.
DType attention_sum_type(DType type);

}  // namespace md
