// Block sizes of attention kernels, measured on the device: the keys enable_tile_search and tile_search_*. Source:
// MaxDiffusion's search before the generation of videos, here for training also.
#pragma once

#include <vector>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/attention_tiles.h"

namespace md {

/// The combinations that are tried, the first being a.blocks, or `usual` if all its sizes are 0. Sizes that are set in
/// a.blocks stay, the others are ladders up to the lengths. Only combinations whose kernels fit the chip's fast memory.
/// Sizes of the forward kernel, or of the gradient's.
std::vector<AttentionBlocks> block_candidates(const TileAttention& a, const AttentionBlocks& usual, bool gradient);

/// a.blocks with the fastest combination, if a.blocks.search says so: each is compiled alone and timed on `device`, and
/// one that is not compiled is left out. Each shape is measured once in a process; the result is logged as the
/// flash_block_sizes to set. Without GraphOptions::measure: a.blocks, or the chip's if all are 0, which is logged.
/// Throws the last combination's error if none can be compiled; io, if the CSV file cannot be written. Thread safe.
AttentionBlocks searched_blocks(const GraphOptions& device, const TileAttention& a, bool gradient);

}  // namespace md
