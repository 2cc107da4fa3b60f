// Causal layers over frames, and their cache between chunks of a sequence: processing in chunks gives the result of the
// whole sequence in the memory of one chunk.
#pragma once

#include <functional>
#include <vector>

#include "maxdiffusion/nn/layers.h"

namespace md::nn {

/// The last input frames of each layer (feature cache). The order of layer calls, and all sizes except the frames, must
/// be the same for every chunk.
class FrameMemory {
 public:
  /// `cache`: the cache after the previous chunk; empty for the first chunk, or for a whole sequence.
  explicit FrameMemory(std::vector<Tensor> cache = {}) : before_(std::move(cache)) {}
  bool first() const { return before_.empty(); }
  /// x [B, F, …] preceded by the last `n` input frames of this layer; in the first chunk only x, which the layer pads
  /// with zeros.
  Tensor recall(Tensor x, int64_t n);
  /// For a layer that the first chunk skips: caches `n` zero frames of the sizes of x's frames.
  void start(Tensor x, int64_t n);
  /// The cache for the next chunk.
  const std::vector<Tensor>& cache() const { return after_; }

 private:
  std::vector<Tensor> before_, after_;
};

/// Applies `f`, [N, h, w, c] → [N, h', w', c'], to every frame of x [B, F, h, w, c].
Tensor per_frame(Tensor x, const std::function<Tensor(Tensor)>& f);

struct CausalConvOptions {
  int64_t out = 0;
  std::array<int64_t, 3> kernel = {3, 3, 3};  // frames, height, width; height and width odd
};
/// Causal convolution of stride 1: the result at a frame depends on that frame and the kernel[0] − 1 before it; height
/// and width are unchanged.   x: [B, F, H, W, in] → [B, F, H, W, out].
Tensor causal_conv3d(const Scope& s, Tensor x, const CausalConvOptions& o, FrameMemory& memory);

}  // namespace md::nn
