// Layers over frames that look back only, and what they remember between chunks of one sequence: given to a model chunk
// by chunk, a sequence comes out as it does in one piece, and the memory needed is that of a chunk.
#pragma once

#include <vector>

#include "maxdiffusion/nn/layers.h"

namespace md::nn {

/// The last frames that each layer of a model has seen. Layers use it in the order in which they are called, which must
/// be the same for every chunk; sizes, frames aside, too.
class FrameMemory {
 public:
  /// `kept`: what the chunk before left; nothing for the first chunk of a sequence, or for all of it in one piece.
  explicit FrameMemory(std::vector<Tensor> kept = {}) : before_(std::move(kept)) {}
  bool first() const { return before_.empty(); }
  /// x [B, F, …] behind the last `n` frames that this layer saw; in the first chunk x alone, where zeros go before it.
  Tensor recall(Tensor x, int64_t n);
  /// For a layer that the first chunk does not reach: it has seen `n` zeros of the sizes of x's frames.
  void start(Tensor x, int64_t n);
  /// For the next chunk.
  const std::vector<Tensor>& kept() const { return after_; }

 private:
  std::vector<Tensor> before_, after_;
};

struct CausalConvOptions {
  int64_t out = 0;
  std::array<int64_t, 3> kernel = {3, 3, 3};  // frames, height, width; height and width odd
};
/// Convolution of stride 1 whose result at a frame depends on that frame and the kernel[0] − 1 before it; height and
/// width stay.   x: [B, F, H, W, in] → [B, F, H, W, out].
Tensor causal_conv3d(const Scope& s, Tensor x, const CausalConvOptions& o, FrameMemory& memory);

}  // namespace md::nn
