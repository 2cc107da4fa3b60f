// Attention: softmax(scale · q·kᵀ + mask) · v. Models say what; a table in attention.cc says how.
#pragma once

#include <optional>
#include <string>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/dot.h"

namespace md {

/// Logical names of the axes of q [batch, length, heads, head_dim] and of k and v [batch, kv_length, heads, head_dim];
/// "": unknown. Kernels for meshes lay their operands by them.
struct AttentionAxes {
  std::string batch = {}, length = {}, kv_length = {}, heads = {}, head_dim = {};
};

struct AttentionOptions {
  std::string kernel = "dot_product";  // key `attention`; throws invalid_config with the known names
  int64_t flash_min_seq_length = 256;  // "flash" is "dot_product" where q or k is shorter
  double scale = 0;                    // 0: 1/sqrt(D)
  bool causal = false;
  Tensor bias = {};  // added to the logits, broadcast to [B, H, Lq, Lk]
  Precision precision = Precision::default_;
  AttentionAxes axes = {};
};

/// "dot_product" writes all logits; "flash" goes head by head and block of queries by block, and computes them again on
/// the way back, so that the memory it needs does not grow with B·H·Lq. On a mesh of several devices, with a bias and
/// for short sequences "flash" is "dot_product", and the log says so once. On one CPU device, in f32 and bf16 and
/// without a bias, both are a kernel that keeps no logits; it has no second derivative.
/// q: [B, Lq, H, D]   k, v: [B, Lk, H, D]   result: [B, Lq, H, D], dtype of q; softmax in f32.
Tensor attention(Tensor q, Tensor k, Tensor v, AttentionOptions options = {});
/// Throws invalid_config with the known names when this is none.
void check_attention_kernel(const std::string& name);

}  // namespace md
