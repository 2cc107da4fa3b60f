// CAME on the CPU, many parameters per call, in four passes: means of squares, the size of the update, its average and
// how far it is from that, the step. Source: Luo et al. 2023.

#include <algorithm>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/factored.h"
#include "maxdiffusion/kernels/kernels.h"

namespace md {
namespace {

/// Moves the average m of updates, and sums (update − m)² + eps of rows and columns.
MD_VECTORIZED void average_updates(const FactoredPart& part, const FactoredGradients& o, float scale, float b1,
                                   float eps, const float* __restrict g, float* __restrict m) {
  const float max_value = o.max_value, new1 = 1 - b1;
  const int64_t n = part.columns;
  std::fill_n(part.column_sums, part.matrices * n, 0.0f);
  float* row = part.row;
  for (int64_t matrix = 0; matrix < part.matrices; ++matrix) {
    const float* __restrict columns = part.column + matrix * n;
    float* __restrict sums = part.column_sums + matrix * n;
    for (int64_t i = 0; i < part.rows; ++i, g += n, m += n, ++row) {
      const float of_row = *row * o.factor * scale;
      prefetch(g + kAhead, n);
      prefetch(m + kAhead, n);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < n; ++j) {
        const float update = limited(g[j], max_value) * of_row * columns[j], average = m[j] * b1 + update * new1;
        const float squared = (update - average) * (update - average) + eps;
        m[j] = average;
        sums[j] += squared;
        sum += squared;
      }
      *row = sum;
    }
  }
}

/// p moves along m, scaled by rows and columns if `factored`.
MD_VECTORIZED void move_along(const FactoredPart& part, float rate, float weight_decay, bool factored,
                              float* __restrict p, const float* __restrict m) {
  const int64_t n = part.columns;
  const float retained = 1 - weight_decay * rate;
  if (!factored) {
    const int64_t size = part.size();
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) p[i] = p[i] * retained - m[i] * rate;
    return;
  }
  const float* row = part.row;
  for (int64_t matrix = 0; matrix < part.matrices; ++matrix) {
    const float* __restrict columns = part.column + matrix * n;
    for (int64_t i = 0; i < part.rows; ++i, p += n, m += n) {
      const float of_row = *row++ * rate;
      prefetch(p + kAhead, n);
      prefetch(m + kAhead, n);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) p[j] = p[j] * retained - m[j] * of_row * columns[j];
    }
  }
}

ffi::Error came_kernel(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rates, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, double b1, double b2, double b3, double eps, double eps_unstable,
                       double clip_threshold, double weight_decay, double max_value, bool factored,
                       ffi::Span<const int64_t> layers, int64_t averages) {
  Span span("came");
  const size_t average = factored ? 7 : 4;
  auto lists = lists_of(args, rets, average + (averages != 0 ? 1 : 0));
  if (lists.has_error()) return lists.error();
  const float* r = rates.typed_data();
  if (r[2] == 0) return ffi::Error::Success();
  const FactoredGradients gradients{limit_of(max_value), r[1]};
  update_factored(pool, args, *lists, layers, factored, [&](FactoredWave& wave) {
    wave.pass(
        [&](FactoredPart& part) { sum_squares(part, gradients, static_cast<float>(eps), wave.numbers(part, 0)); });
    wave.take_sums(3, factored ? 4 : 3, static_cast<float>(b2), static_cast<float>(1 - b2));
    wave.pass([&](FactoredPart& part) { sum_scaled_squares(part, gradients, wave.numbers(part, 0), nullptr); });
    const std::vector<float> updates = wave.root_mean_squares(&FactoredPart::updates);
    wave.pass([&](FactoredPart& part) {
      const float large = updates[part.layer] / static_cast<float>(clip_threshold);
      average_updates(part, gradients, 1 / std::max(large, 1.0f), static_cast<float>(b1),
                      static_cast<float>(eps_unstable), wave.numbers(part, 0), wave.numbers(part, 2));
    });
    if (factored) wave.take_sums(5, 6, static_cast<float>(b3), static_cast<float>(1 - b3));
    wave.pass([&](FactoredPart& part) {
      float* p = wave.numbers(part, 1);
      move_along(part, r[0], static_cast<float>(weight_decay), factored, p, wave.numbers(part, 2));
      if (averages != 0) move_averages(r[3], p, wave.numbers(part, average), part.size());
    });
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kCame, came_kernel,
                       update_binding()
                           .Attr<double>("b1")
                           .Attr<double>("b2")
                           .Attr<double>("b3")
                           .Attr<double>("eps")
                           .Attr<double>("eps_unstable")
                           .Attr<double>("clip_threshold")
                           .Attr<double>("weight_decay")
                           .Attr<double>("max_value")
                           .Attr<bool>("factored")
                           .Attr<ffi::Span<const int64_t>>("layers")
                           .Attr<int64_t>("averages"));

}  // namespace

void* came_handler() { return reinterpret_cast<void*>(kCame); }

}  // namespace md
