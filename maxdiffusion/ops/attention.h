// Attention: softmax(scale · q·kᵀ + mask) · v. A table in attention.cc chooses the implementation.
#pragma once

#include <optional>
#include <string>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/attention_parts.h"

namespace md {

/// Logical names of the axes of q [batch, length, heads, head_dim] and of k and v [batch, kv_length, heads, head_dim];
/// "": unknown. Kernels on meshes shard their operands by them.
struct AttentionAxes {
  std::string batch = {}, length = {}, kv_length = {}, heads = {}, head_dim = {};
};

struct AttentionOptions {
  std::string kernel = "dot_product";  // key `attention`; throws invalid_config with the known names
  int64_t flash_min_seq_length = 256;  // shorter q or k: "flash" becomes "dot_product"
  AttentionBlocks blocks = {};         // block sizes; the CPU kernel chooses its own
  double scale = 0;                    // 0: 1/sqrt(D)
  bool causal = false;
  Tensor bias = {};     // added to the logits, broadcast to [B, H, Lq, Lk]
  Tensor lengths = {};  // s32 [B]: keys at this position and later are padding; absent: none are
  /// s32 [B, Lq] and [B, Lk], both or neither: a query attends to the keys of its segment, which must have at least
  /// one.
  Tensor query_segments = {}, key_segments = {};
  Precision precision = Precision::default_;
  AttentionAxes axes = {};
  bool cudnn = true;  // false: on NVIDIA GPUs this program's kernels, as for the names of Tokamax's
};

/// "dot_product" materializes all logits; "flash" and the others iterate over heads and blocks of queries, so that
/// memory does not grow with B·H·Lq·Lk. All recompute the logits in the backward pass, except with a bias, where they
/// are stored. On CPU devices, in f32 and bf16 and without a bias, all use a kernel that stores no logits. On NVIDIA
/// GPUs, in bf16 and f16, all but "dot_product" and the names of Tokamax use cuDNN (not with lengths; that is logged).
/// With a bias, segments or a short sequence, "flash" becomes "dot_product", which is logged once; not on a single TPU
/// with segments or a bias [B, 1, 1, Lk], which its kernels support. On a mesh, with `axes`, each device computes the
/// queries of its shard. Keys and values of the sequence are exchanged with the least communication ("dot_product",
/// "flash"), by "ring", or by "ulysses" (whole sequences of some heads). With a bias or segments, or without `axes`,
/// the compiler partitions "dot_product". Second derivatives exist only with a bias. Grouped-query attention: k and v
/// may have G times fewer heads than q; head h of q uses head h / G of theirs. q: [B, Lq, H, D]   k, v: [B, Lk, H / G,
/// D]   result: [B, Lq, H, D], dtype of q; softmax in f32.
Tensor attention(Tensor q, Tensor k, Tensor v, AttentionOptions options = {});
/// Throws invalid_config, listing the known names, for an unknown name.
void check_attention_kernel(const std::string& name);

}  // namespace md
