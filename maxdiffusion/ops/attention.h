// Attention: softmax(scale · q·kᵀ + mask) · v. Models say what; a table in attention.cc says how.
#pragma once

#include <optional>
#include <string>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/dot.h"

namespace md {

struct AttentionOptions {
  std::string kernel = "dot_product";  // key `attention`; throws invalid_config with the known names
  double scale = 0;                    // 0: 1/sqrt(D)
  bool causal = false;
  Tensor bias = {};  // added to the logits, broadcast to [B, H, Lq, Lk]
  Precision precision = Precision::default_;
};

/// q: [B, Lq, H, D]   k, v: [B, Lk, H, D]   result: [B, Lq, H, D], dtype of q; softmax in f32.
Tensor attention(Tensor q, Tensor k, Tensor v, AttentionOptions options = {});

}  // namespace md
