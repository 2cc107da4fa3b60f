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
  const RankLines lines = rank_lines(with_sign);
  const Tensor a = abs(x), is_one = gt(x, scalar_like(x, lines.to_one));
  Tensor rank;
  for (int i = 0; i < RankLines::kCount; ++i) {
    const Tensor next = a * lines.slope[i] + lines.offset[i];
    rank = rank ? minimum(rank, next) : next;
  }
  rank = floor(rank);
  if (!with_sign) return cast(where(is_one, scalar_like(x, 255), rank), DType::s32);
  rank = minimum(rank, scalar_like(rank, 127));
  const Tensor above = where(is_one, scalar_like(x, 128), rank);
  return cast(where(lt(x, scalar_like(x, 0)), 127.0 - rank, above + 127.0), DType::s32);
}

}  // namespace

EightBits in_eight_bits(Tensor x, int64_t layers, bool with_sign) {
  const Tensor blocks = in_blocks(x, layers), largest = max(abs(blocks), {2}, true);
  const Tensor inverse = where(gt(largest, scalar_like(largest, kLeastScale)), 1.0 / largest, scalar_like(largest, 0));
  const Tensor codes = cast(nearest(blocks * inverse, with_sign), DType::u8);
  return {out_of_blocks(codes, layers, x.dims()), squeeze(largest, 2)};
}

Tensor from_eight_bits(const EightBits& x, int64_t layers, bool with_sign) {
  const auto& map = dynamic_map(with_sign);
  const Tensor table = constant(x.codes.graph(), HostArray::of<float>({DType::f32, {256}}, map));
  const Tensor values = take(table, cast(in_blocks(x.codes, layers), DType::s32)) * expand_dims(x.scales, 2);
  return out_of_blocks(values, layers, x.codes.dims());
}

}  // namespace md
