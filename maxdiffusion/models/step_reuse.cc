#include "maxdiffusion/models/step_reuse.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// Sum of sizes over the tokens that count, f32 [].
Tensor size_of(Tensor x, Tensor counts) {
  Tensor y = abs(cast(x, DType::f32));
  return sum(counts ? y * counts : y);
}

Tensor with_first_block(const Scope& s, const BlockSequence& blocks, StepReuse& reuse) {
  check(!s.options().scan_layers, Code::invalid_graph, "run_blocks: blocks are stacked; the first runs alone");
  const Tensor start = blocks.start.back();
  const BlockSequence::Streams after_first = blocks.first(s, blocks.start);
  const Tensor image = after_first.back(), added = image - start;
  if (reuse.arrays.empty()) {
    const Tensor end = blocks.rest(s, after_first, 1);
    reuse.arrays = {added, end - image};
    return end;
  }
  const Tensor before = cast(reuse.arrays.at(0), added.dtype()), others = cast(reuse.arrays.at(1), image.dtype());
  const Tensor size = size_of(before, blocks.counts);
  const Tensor close =
      bit_and(le(size_of(added - before, blocks.counts), size * reuse.threshold), gt(size, zeros_like(size)));
  // At most one iteration: the other blocks run, or not.
  const std::vector<Tensor> out = while_loop(
      {bit_not(close), others, image + others}, [](const std::vector<Tensor>& carry) { return carry[0]; },
      [&](const std::vector<Tensor>& carry) -> std::vector<Tensor> {
        const Tensor end = blocks.rest(s.in_graph(carry[0].graph()), after_first, 1);
        return {bit_xor(carry[0], carry[0]), end - image, end};
      });
  reuse.arrays = {where(close, before, added), out[1]};
  reuse.reused = cast(close, DType::f32);
  return out[2];
}

}  // namespace

Tensor run_blocks(const Scope& s, const BlockSequence& blocks, StepReuse* reuse) {
  if (!reuse) return blocks.rest(s, blocks.start, 0);
  if (reuse->of == StepReuse::Of::other_blocks) return with_first_block(s, blocks, *reuse);
  const Tensor start = blocks.start.back();
  if (!reuse->replaces_blocks()) {
    const Tensor end = blocks.rest(s, blocks.start, 0);
    reuse->arrays = {end - start};
    return end;
  }
  const Tensor added = reuse->arrays[0];
  check(added.dims() == start.dims(), Code::invalid_graph, "run_blocks: what the blocks add is {}, expected {}",
        to_string(added.shape()), to_string(start.shape()));
  return start + cast(added, start.dtype());
}

}  // namespace md
