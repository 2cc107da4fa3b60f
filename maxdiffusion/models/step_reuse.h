// Denoisers that take results of an earlier step instead of computing them. Sources: Ma et al. 2025 (MagCache: all
// blocks); Liu et al. 2024 (TeaCache: all blocks, section 3.3); ParaAttention's first-block cache, as in diffusers
// 0.42, hooks/first_block_cache.py; Ma et al. 2023 (DeepCache: the deep levels of a UNet).
#pragma once

#include <functional>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

/// What a denoiser reuses. Its inputs, and what it returns in them for later steps.
struct StepReuse {
  enum class Of {
    blocks,        // arrays: what all blocks add to the sample's tokens [B, L, D]
    input_blocks,  // arrays: BlockSequence::input of the step before, what the blocks added when they last ran, and the
                   // distance since, f32 []: the sum of polynomials of the input's relative change from step to step.
                   // The blocks run unless the distance is below the threshold
    other_blocks,  // arrays: what the first block adds, and what the others add. They run unless the first block adds
                   // nearly the same as in the step that computed the arrays
    deep_levels,   // arrays: the features [B, h, w, C] that a UNet computes below skip connection `branch`
  };
  Of of = Of::blocks;
  /// Of other_blocks: the mean distance of what the first block adds, divided by its mean size, up to which the others
  /// are reused. Of input_blocks: of the distance.
  double threshold = 0;
  std::vector<double> coefficients = {};  // of input_blocks: of the polynomial, that of the highest power first
  Tensor runs = {};                       // of input_blocks: f32 [], above 0: the blocks run
  int64_t branch = 0;                     // of deep_levels: 0 is the finest skip connection
  /// Of the last step that computed them. Empty: everything is computed. Those of other_blocks and input_blocks may be
  /// zeros: they are not reused. Replaced by the next step's.
  std::vector<Tensor> arrays = {};
  Tensor reused = {};  // result with arrays of other_blocks and input_blocks: f32 [], 1 if they were reused, else 0

  /// Whether no block runs.
  bool replaces_blocks() const { return of == Of::blocks && !arrays.empty(); }
};

/// The blocks of a transformer. Streams are hidden states [B, L, D], the last one that of the sample's tokens.
struct BlockSequence {
  using Streams = std::vector<Tensor>;
  Streams start;  // before the first block
  /// Block 0. s: scope of the model.
  std::function<Streams(const Scope& s, const Streams& streams)> first;
  /// Blocks `from` and later: the sample's stream behind them.
  std::function<Tensor(const Scope& s, const Streams& streams, int64_t from)> rest;
  /// What block 0 computes from, or its modulation alone: it changes as the blocks' results do. May trace parameters of
  /// block 0.
  std::function<Tensor(const Scope& s, const Streams& streams)> input = {};
  Tensor counts = {};  // f32 [B, L, 1]: 1 for tokens that are compared, 0 for padding; absent: all are
};
/// The sample's stream after all blocks. s: scope of the model. reuse: null: nothing is reused. other_blocks and
/// input_blocks need blocks that are not stacked (scan_layers).
Tensor run_blocks(const Scope& s, const BlockSequence& blocks, StepReuse* reuse);

}  // namespace md
