// Multi-head attention with diffusers' parameter names: to_q, to_k, to_v, to_out.0.
#pragma once

#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/attention.h"

namespace md::nn {

/// Attention options of the scope; `axes`: logical axes of the operands.
AttentionOptions attention_options(const Scope& s, AttentionAxes axes = {});

/// attention() with names for remat policies (autodiff/named_values.h) on its inputs and output. With a scope, the
/// output of rows perturbed by ScopeOptions::perturbation at this layer is their values v.   q, k, v: [B, L, heads, d];
/// a perturbed layer needs equal head counts.
Tensor self_attend(const Scope& s, Tensor q, Tensor k, Tensor v, const AttentionOptions& o);
Tensor self_attend(Tensor q, Tensor k, Tensor v, const AttentionOptions& o);
Tensor cross_attend(Tensor q, Tensor k, Tensor v, const AttentionOptions& o);

struct MultiHeadOptions {
  int64_t heads = 1;
  bool qkv_bias = false;
  bool upcast = false;  // q and k in f32
  Tensor lengths = {};  // AttentionOptions::lengths
  /// q [B, L, N, D] → [B, L, N, D], added to what the attention gives; empty: nothing.
  std::function<Tensor(Tensor q)> also = {};
  bool annotated = true;  // logical axes on weights and activations; false: everything replicated
};
/// x: [B, L, C]   context: [B, Lk, D], or x for self attention → [B, L, C]. C must be divisible by the heads.
Tensor multi_head_attention(const Scope& s, Tensor x, Tensor context, const MultiHeadOptions& o);

}  // namespace md::nn
