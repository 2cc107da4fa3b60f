#include "maxdiffusion/nn/causal.h"

#include <algorithm>
#include <limits>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md::nn {
namespace {

Tensor zero_frames(Tensor x, int64_t n) {
  Dims dims = x.dims();
  dims[1] = n;
  return full(x.graph(), 0, {x.dtype(), dims});
}

}  // namespace

Tensor FrameMemory::recall(Tensor x, int64_t n) {
  if (n == 0) return x;
  Tensor frames_so_far = x;
  if (!first()) {
    check(after_.size() < before_.size(), Code::invalid_graph,
          "a chunk of frames needs more than the {} cached arrays of the chunk before it", before_.size());
    frames_so_far = concatenate({before_[after_.size()], x}, 1);
  }
  const int64_t frames = frames_so_far.dim(1);
  Tensor last = slice_axis(frames_so_far, 1, std::max<int64_t>(frames - n, 0), std::numeric_limits<int64_t>::max());
  after_.push_back(frames >= n ? last : concatenate({zero_frames(x, n - frames), last}, 1));
  return frames_so_far;
}

void FrameMemory::start(Tensor x, int64_t n) { after_.push_back(zero_frames(x, n)); }

Tensor per_frame(Tensor x, const std::function<Tensor(Tensor)>& f) {
  const int64_t batch = x.dim(0), frames = x.dim(1);
  const Tensor y = f(reshape(x, {batch * frames, x.dim(2), x.dim(3), x.dim(4)}));
  return reshape(y, {batch, frames, y.dim(1), y.dim(2), y.dim(3)});
}

Tensor causal_conv3d(const Scope& s, Tensor x, const CausalConvOptions& o, FrameMemory& memory) {
  const int64_t back = o.kernel[0] - 1, high = o.kernel[1] / 2, wide = o.kernel[2] / 2;
  const bool first = memory.first();
  return conv3d(
      s, memory.recall(x, back),
      {.out = o.out, .kernel = o.kernel, .pad_low = {first ? back : 0, high, wide}, .pad_high = {0, high, wide}});
}

}  // namespace md::nn
