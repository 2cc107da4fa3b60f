// Attention on meshes: each device attends with queries of its own, batch, heads and queries being split as the rules
// say; keys and values come to it along the axes that split the sequence.
#pragma once

#include "maxdiffusion/ops/attention.h"

namespace md {

/// How keys and values of a split sequence come to the queries.
enum class ContextParallelism {
  automatic,        // exchanged where heads divide among more than two devices, else gathered on every device
  ring,             // from device to device, and on the way back their gradients with them
  ulysses,          // sequences for heads (Ulysses): each device has the whole sequence of some heads
  ulysses_or_ring,  // exchanged where the heads divide, else ring
};

/// Why attention cannot be laid on the mesh by logical names (null: it can).
const char* mesh_attention_refuses(Tensor q, const AttentionOptions& options);

/// Lengths that do not divide are padded; padded keys count nothing. Keys whose length is another than that of the
/// queries are whole along the sequence's axes. `in_blocks`: keep no logits. Throws invalid_config, with the numbers,
/// where heads do not divide among the devices that share them.
Tensor mesh_attention(Tensor q, Tensor k, Tensor v, const AttentionOptions& options, ContextParallelism travel,
                      bool in_blocks);

}  // namespace md
