// Attention: softmax(scale · q·kᵀ + mask) · v. Models say what; a table in attention.cc says how.
#pragma once

#include <optional>
#include <string>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/attention_parts.h"

namespace md {

/// Logical names of the axes of q [batch, length, heads, head_dim] and of k and v [batch, kv_length, heads, head_dim];
/// "": unknown. Kernels for meshes lay their operands by them.
struct AttentionAxes {
  std::string batch = {}, length = {}, kv_length = {}, heads = {}, head_dim = {};
};

struct AttentionOptions {
  std::string kernel = "dot_product";  // key `attention`; throws invalid_config with the known names
  int64_t flash_min_seq_length = 256;  // "flash" is "dot_product" where q or k is shorter
  AttentionBlocks blocks = {};         // where there are blocks; the CPU kernel chooses its own
  double scale = 0;                    // 0: 1/sqrt(D)
  bool causal = false;
  Tensor bias = {};     // added to the logits, broadcast to [B, H, Lq, Lk]
  Tensor lengths = {};  // s32 [B]: keys of a sample at this position and behind it are padding; absent: none are
  Precision precision = Precision::default_;
  AttentionAxes axes = {};
};

/// "dot_product" writes all logits; "flash" and the others go head by head and block of queries by block, so that no
/// memory grows with B·H·Lq·Lk. All make the logits again on the way back, but for a bias, with which they are kept. On
/// CPU devices, in f32 and bf16 and without a bias, all are a kernel that writes no logits; on NVIDIA GPUs, in bf16 and
/// f16, all but "dot_product" are cuDNN's. Where there is a bias or a short sequence "flash" is "dot_product", and the
/// log says so once.
/// On a mesh, given `axes`, each device attends for itself, with the queries that the rules give it. Keys of the same
/// sequence come to it as is least to send ("dot_product", "flash"), in a "ring", or "ulysses": whole sequences of some
/// heads.
/// With a bias or without `axes` the compiler divides "dot_product".
/// No second derivative, but with a bias.
/// cuDNN's takes no lengths; the log says what is used in its place. Grouped heads: k and v may have G times fewer
/// heads than q, and head h of q attends with head h / G of theirs, which are repeated. q: [B, Lq, H, D]   k, v: [B,
/// Lk, H / G, D]   result: [B, Lq, H, D], dtype of q; softmax in f32.
Tensor attention(Tensor q, Tensor k, Tensor v, AttentionOptions options = {});
/// Throws invalid_config with the known names when this is none.
void check_attention_kernel(const std::string& name);

}  // namespace md
