#include "maxdiffusion/models/step_reuse.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/nn/repeatable.h"
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

/// What blocks `from` and later add to the sample's stream, and the sum: `otherwise`, if the blocks need not run.
std::vector<Tensor> run_unless(Tensor close, const Scope& s, const BlockSequence& blocks,
                               const BlockSequence::Streams& streams, int64_t from, Tensor otherwise) {
  const Tensor start = streams.back();
  return run_if(bit_not(close), streams, {otherwise, start + otherwise}, [&](const BlockSequence::Streams& inside) {
    const Tensor end = blocks.rest(s.in_graph(inside.back().graph()), inside, from);
    return std::vector<Tensor>{end - inside.back(), end};
  });
}

Tensor with_first_block(const Scope& s, const BlockSequence& blocks, StepReuse& reuse) {
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
  const std::vector<Tensor> out = run_unless(close, s, blocks, after_first, 1, others);
  reuse.arrays = {where(close, before, added), out[0]};
  reuse.reused = cast(close, DType::f32);
  return out[1];
}

Tensor polynomial(const std::vector<double>& coefficients, Tensor x) {
  Tensor sum = zeros_like(x);
  for (const double c : coefficients) sum = sum * x + c;
  return sum;
}

Tensor by_input(const Scope& root, const BlockSequence& blocks, StepReuse& reuse) {
  const Scope s = repeatable(root);
  const Tensor start = blocks.start.back(), input = blocks.input(s, blocks.start);
  if (reuse.arrays.empty()) {
    const Tensor end = blocks.rest(s, blocks.start, 0);
    reuse.arrays = {input, end - start, full(s.graph(), 0, {DType::f32, {}})};
    return end;
  }
  const Tensor before = cast(reuse.arrays.at(0), input.dtype()), added = cast(reuse.arrays.at(1), start.dtype());
  const Tensor counts = input.rank() == start.rank() ? blocks.counts : Tensor();
  const Tensor change = size_of(input - before, counts) / size_of(before, counts);
  const Tensor distance = reuse.arrays.at(2) + polynomial(reuse.coefficients, change);
  // If nothing came before, the distance is not a number, and not below the threshold.
  const Tensor close =
      bit_and(lt(distance, scalar_like(distance, reuse.threshold)), le(reuse.runs, zeros_like(reuse.runs)));
  const std::vector<Tensor> out = run_unless(close, s, blocks, blocks.start, 0, added);
  reuse.arrays = {input, out[0], where(close, distance, zeros_like(distance))};
  reuse.reused = cast(close, DType::f32);
  return out[1];
}

}  // namespace

Tensor run_blocks(const Scope& s, const BlockSequence& blocks, StepReuse* reuse) {
  if (!reuse) return blocks.rest(s, blocks.start, 0);
  if (reuse->of == StepReuse::Of::other_blocks || reuse->of == StepReuse::Of::input_blocks) {
    check(!s.options().scan_layers, Code::invalid_graph, "run_blocks: blocks are stacked; the first is needed alone");
    return reuse->of == StepReuse::Of::other_blocks ? with_first_block(s, blocks, *reuse) : by_input(s, blocks, *reuse);
  }
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
