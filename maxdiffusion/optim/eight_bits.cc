#include "maxdiffusion/optim/eight_bits.h"

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// [layers, blocks, kScaleBlock], with zeros after the end of a layer.
Tensor in_blocks(Tensor x, int64_t layers) {
  const int64_t each = x.shape().elements() / layers, blocks = (each + kScaleBlock - 1) / kScaleBlock;
  return reshape(pad_end(reshape(x, {layers, each}), 1, blocks * kScaleBlock), {layers, blocks, kScaleBlock});
}
Tensor out_of_blocks(Tensor blocks, int64_t layers, const Dims& dims) {
  const int64_t each = Shape{DType::u8, dims}.elements() / layers;
  return reshape(slice_axis(reshape(blocks, {layers, -1}), 1, 0, each), dims);
}

/// The codes of numbers in [-1, 1], s32.
Tensor nearest(Tensor x, bool with_sign) {
  const Tensor a = abs(x);
  const Decade lowest = decade(0, with_sign), highest = decade(kDecades - 1, with_sign);
  // The decade: its lower bound is the midpoint between its first number and the last one of the decade below.
  Tensor inverse = full_like(a, 1 / lowest.size), count = full_like(a, lowest.count);
  for (int d = 1; d < kDecades; ++d) {
    const Decade below = decade(d - 1, with_sign), here = decade(d, with_sign);
    const Tensor is_here = gt(a, scalar_like(a, (below.last() + here.first()) / 2));
    inverse = where(is_here, scalar_like(a, 1 / here.size), inverse);
    count = where(is_here, scalar_like(a, here.count), count);
  }
  const Tensor part = floor((a * inverse - 0.1) * (1 / 0.9) * count);
  const Tensor within = maximum(minimum(part, count - 1.0), scalar_like(a, 0));
  Tensor rank = within + count + (1.0 - lowest.count);  // among the positive numbers, from 1
  rank = where(gt(a, scalar_like(a, lowest.first() / 2)), rank, scalar_like(a, 0));
  const double last = (highest.last() + 1) / 2;
  if (!with_sign) return cast(where(gt(a, scalar_like(a, last)), scalar_like(a, 255), rank), DType::s32);
  const Tensor above = where(gt(a, scalar_like(a, last)), scalar_like(a, 128), rank);
  return cast(where(lt(x, scalar_like(x, 0)), 127.0 - rank, above + 127.0), DType::s32);
}

}  // namespace

EightBits in_eight_bits(Tensor x, int64_t layers, bool with_sign) {
  const Tensor blocks = in_blocks(x, layers), largest = max(abs(blocks), {2}, true);
  const Tensor divisor = where(gt(largest, scalar_like(largest, 0)), largest, scalar_like(largest, 1));
  const Tensor codes = cast(nearest(blocks / divisor, with_sign), DType::u8);
  return {out_of_blocks(codes, layers, x.dims()), squeeze(largest, 2)};
}

Tensor from_eight_bits(const EightBits& x, int64_t layers, bool with_sign) {
  const auto& map = dynamic_map(with_sign);
  const Tensor table = constant(x.codes.graph(), HostArray::of<float>({DType::f32, {256}}, map));
  const Tensor values = take(table, cast(in_blocks(x.codes, layers), DType::s32)) * expand_dims(x.scales, 2);
  return out_of_blocks(values, layers, x.codes.dims());
}

}  // namespace md
