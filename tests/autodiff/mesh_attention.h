// Attention options for tests on meshes.
#pragma once

#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/attention.h"

namespace md {

/// Names the axes as the rules do; any sequence length.
inline AttentionOptions mesh_attention_options(const char* kernel, bool causal = false) {
  return {.kernel = kernel,
          .flash_min_seq_length = 0,
          .causal = causal,
          .axes = {.batch = axis::kBatch,
                   .length = axis::kLength,
                   .kv_length = axis::kKvLength,
                   .heads = axis::kHeadsAct,
                   .head_dim = axis::kKv}};
}

}  // namespace md
