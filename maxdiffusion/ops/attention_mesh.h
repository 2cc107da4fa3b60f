// Attention on meshes: each device computes its shard of batch, heads and queries; keys and values are communicated
// along the mesh axes that shard the sequence.
#pragma once

#include "maxdiffusion/ops/attention.h"

namespace md {

/// How keys and values of a sharded sequence are communicated.
enum class ContextParallelism {
  automatic,        // ulysses if the heads are divisible by more than two devices, else all-gather
  ring,             // passed from device to device; in the backward pass with their gradients
  ulysses,          // all-to-all: each device has the whole sequence of some heads
  ulysses_or_ring,  // ulysses if the heads are divisible, else ring
};

/// Why attention cannot be sharded by logical axes; null if it can.
const char* mesh_attention_refuses(Tensor q, const AttentionOptions& options);

/// Pads lengths that are not divisible; padded keys are masked. Keys of another length than the queries are replicated
/// along the axes of the sequence. `in_blocks`: store no logits. Throws invalid_config, with the numbers, if the heads
/// are not divisible by their devices.
Tensor mesh_attention(Tensor q, Tensor k, Tensor v, const AttentionOptions& options, ContextParallelism parallelism,
                      bool in_blocks);

}  // namespace md
