// Attention as two functions, the result and its gradient, which share no more than the result and the logarithms of
// the sums of exponentials. What goes over several devices is put together of them (attention_mesh.h), part by part.
// Sources: Dao et al. 2022 (FlashAttention), algorithms 1 and 2; Liu et al. 2023 (ring attention).
#pragma once

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/dot.h"

namespace md {

/// How many queries and keys at most have their logits made at a time; 0: 1024 queries, and all keys. The last two are
/// of the gradient; 0: as the first two. All 0: as a table says for some TPUs (attention.cc).
struct AttentionBlocks {
  int64_t queries = 0, keys = 0, gradient_queries = 0, gradient_keys = 0;
  bool operator==(const AttentionBlocks&) const = default;
};

/// q [B, Lq, H, D], k and v [B, Lk, H, D] of one device.
struct LocalAttention {
  double scale = 1;
  Precision precision = Precision::default_;
  /// Keeps no logits: head by head and block by block. False: all logits at once.
  bool in_blocks = true;
  AttentionBlocks blocks = {};
  bool causal = false;
  Tensor bias = {};  // added to the logits, broadcast to [B, H, Lq, Lk]; with all logits at once, and by autodiff, only
  /// Positions of the first query and the first key among all, s32; absent: 0.
  Tensor first_query = {}, first_key = {};
  /// Keys at this position and behind it are padding; -1: none.
  int64_t keys = -1;
  /// s32 [B]: keys of a sample at this position, counted as first_key is, and behind it are padding; absent: none. May
  /// be 0 and less: the sample sees no key.
  Tensor lengths = {};
};

struct AttentionResult {
  Tensor y;    // like q; f32 (f64 of f64) where it was summed in it
  Tensor lse;  // f32 (f64) [B, H, Lq]: logarithm of each row's sum of exponentials
};
/// Of two parts of the keys together. `beside` gives lse the shape of y. y in f32 (f64).
AttentionResult merge_attention(const AttentionResult& a, const AttentionResult& b, Tensor (*beside)(Tensor lse));

/// A query that sees no key gets a finite y, and an lse so small that the part counts nothing in a sum of parts.
AttentionResult local_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& how);

/// Gradients of q, k and v, in f32 (f64) or like q, from this part of the keys: y and lse are those of all keys.
struct AttentionGradient {
  Tensor q, k, v;
};
AttentionGradient local_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                           const LocalAttention& how);

/// Of a node whose first inputs are q and k: operations of `products` matrix products of the size of q·kᵀ.
double attention_flops(const Node& n, double products);

/// f32, or f64 of f64: what sums are made in.
DType attention_sum_type(DType type);

}  // namespace md
