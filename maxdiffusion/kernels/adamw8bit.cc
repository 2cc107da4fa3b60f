// AdamW with moments of 8 bits (base/dynamic_map.h) on the CPU, many parameters per call. Sources: Loshchilov and
// Hutter 2019; Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".

#include <algorithm>
#include <cmath>
#include <vector>

#include "maxdiffusion/base/dynamic_map.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/eight_bit_codes.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/update.h"

namespace md {
namespace {

struct EightBitStep {
  float b1, b2, eps, weight_decay, max_value, lr, correction1, correction2, scale;
};
/// Moments of a block, and the largest value of each.
struct BlockMoments {
  float m[kScaleBlock], v[kScaleBlock], largest_m, largest_v;
};

MD_VECTORIZED void move_block(const EightBitStep& s, const float* __restrict g, float* __restrict p, float scale_m,
                              float scale_v, BlockMoments& __restrict block, int64_t n) {
  const float b1 = s.b1 * scale_m, b2 = s.b2 * scale_v, new1 = 1 - s.b1, new2 = 1 - s.b2, by1 = 1 / s.correction1,
              by2 = 1 / s.correction2, eps = s.eps, decay = s.weight_decay, max_value = s.max_value, factor = s.scale,
              lr = s.lr;
  float largest_m = 0, largest_v = 0;
#pragma omp simd reduction(max : largest_m, largest_v)
  for (int64_t i = 0; i < n; ++i) {
    const float grad = limited(g[i], max_value) * factor;
    const float m = block.m[i] * b1 + grad * new1;
    const float v = block.v[i] * b2 + grad * grad * new2;
    const float old = p[i];
    p[i] = old - (m * by1 / (std::sqrt(v * by2) + eps) + old * decay) * lr;
    block.m[i] = m;
    block.v[i] = v;
    const float magnitude = std::fabs(m);
    largest_m = magnitude > largest_m ? magnitude : largest_m;
    largest_v = v > largest_v ? v : largest_v;
  }
  block.largest_m = largest_m;
  block.largest_v = largest_v;
}

/// Blocks of one parameter's layer, processed by one thread.
struct BlockRange {
  size_t array;
  int64_t layer, from, to;
};

ffi::Error adamw8bit_kernel(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rates, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, double b1, double b2, double eps, double weight_decay,
                            double max_value, int64_t averages) {
  Span span("adamw8bit");
  const size_t count = averages != 0 ? 7 : 6;
  auto lists = lists_of(args, rets, count);
  if (lists.has_error()) return lists.error();
  const float* r = rates.typed_data();
  if (r[4] == 0) return ffi::Error::Success();
  const EightBitStep step{static_cast<float>(b1),
                          static_cast<float>(b2),
                          static_cast<float>(eps),
                          static_cast<float>(weight_decay),
                          limit_of(max_value),
                          r[0],
                          r[1],
                          r[2],
                          r[3]};
  const size_t n = args.size() / count;
  std::vector<BlockRange> ranges;
  std::vector<int64_t> blocks(n), each(n);
  for (size_t a = 0; a < n; ++a) {
    const auto scales = args.get<ffi::AnyBuffer>(4 * n + a);
    if (scales.has_error()) return scales.error();
    const int64_t layers = scales->dimensions()[0];
    blocks[a] = scales->dimensions()[1];
    each[a] = (*lists)[0].sizes[a] / layers;
    constexpr int64_t kTogether = 256;  // blocks per chunk: as many elements as in chunks of other updates
    for (int64_t layer = 0; layer < layers; ++layer)
      for (int64_t from = 0; from < blocks[a]; from += kTogether)
        ranges.push_back({a, layer, from, std::min(from + kTogether, blocks[a])});
  }
  parallel_for(pool, static_cast<int64_t>(ranges.size()), [&](int64_t i) {
    const BlockRange& range = ranges[static_cast<size_t>(i)];
    const auto numbers = [&](size_t list) { return static_cast<float*>((*lists)[list].data[range.array]); };
    const auto codes = [&](size_t list) { return static_cast<uint8_t*>((*lists)[list].data[range.array]); };
    const int64_t size = each[range.array];
    BlockMoments moments;
    for (int64_t block = range.from; block < range.to; ++block) {
      const int64_t at = range.layer * size + block * kScaleBlock, of = range.layer * blocks[range.array] + block;
      const int64_t length = std::min(kScaleBlock, size - block * kScaleBlock);
      float *scale_m = numbers(4) + of, *scale_v = numbers(5) + of;
      constexpr int64_t kAhead = 2;  // blocks
      if (block + kAhead < range.to) {
        const int64_t ahead = at + kAhead * kScaleBlock;
        prefetch(numbers(0) + ahead, kScaleBlock);
        prefetch(numbers(1) + ahead, kScaleBlock);
        for (int64_t i = 0; i < kScaleBlock; i += 64) {
          __builtin_prefetch(codes(2) + ahead + i, 1);
          __builtin_prefetch(codes(3) + ahead + i, 1);
        }
      }
      decode(true, codes(2) + at, moments.m, length);
      decode(false, codes(3) + at, moments.v, length);
      move_block(step, numbers(0) + at, numbers(1) + at, *scale_m, *scale_v, moments, length);
      *scale_m = moments.largest_m, *scale_v = moments.largest_v;
      encode(true, moments.m, inverse_scale(*scale_m), codes(2) + at, length);
      encode(false, moments.v, inverse_scale(*scale_v), codes(3) + at, length);
      if (count > 6) move_averages(r[5], numbers(1) + at, numbers(6) + at, length);
    }
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kAdamw8bit, adamw8bit_kernel,
                       update_binding()
                           .Attr<double>("b1")
                           .Attr<double>("b2")
                           .Attr<double>("eps")
                           .Attr<double>("weight_decay")
                           .Attr<double>("max_value")
                           .Attr<int64_t>("averages"));

}  // namespace

void* adamw8bit_handler() { return reinterpret_cast<void*>(kAdamw8bit); }

}  // namespace md
