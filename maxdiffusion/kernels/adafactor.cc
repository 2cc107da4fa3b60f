// Adafactor on the CPU, many parameters per call, in three passes: means of squares, the size of the update, the
// update. Source: Shazeer and Stern 2018.

#include <algorithm>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/factored.h"
#include "maxdiffusion/kernels/kernels.h"

namespace md {
namespace {

struct AdafactorStep {
  FactoredGradients gradients;
  float rate, b1, weight_decay;  // rate: of this layer, with its clipping; weight_decay: times the layer's rate
};

/// Updates p, and m unless null.
MD_VECTORIZED void move_by_factors(const AdafactorStep& s, const FactoredPart& part, const float* __restrict g,
                                   float* __restrict p, float* __restrict m) {
  const float max_value = s.gradients.max_value, b1 = s.b1, new1 = 1 - s.b1, retained = 1 - s.weight_decay;
  const int64_t n = part.columns;
  const float* row = part.row;
  for (int64_t matrix = 0; matrix < part.matrices; ++matrix) {
    const float* __restrict columns = part.column + matrix * n;
    for (int64_t i = 0; i < part.rows; ++i, g += n, p += n) {
      const float of_row = *row++ * s.gradients.factor * s.rate;
      prefetch(g + kAhead, n);
      prefetch(p + kAhead, n);
      if (m == nullptr) {
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) p[j] = p[j] * retained - limited(g[j], max_value) * of_row * columns[j];
      } else {
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          m[j] = m[j] * b1 + limited(g[j], max_value) * of_row * columns[j] * new1;
          p[j] = p[j] * retained - m[j];
        }
        m += n;
      }
    }
  }
}

ffi::Error adafactor_kernel(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rates, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, double eps, double least_size, double clip_threshold, double b1,
                            double weight_decay, double max_value, bool relative, bool factored,
                            ffi::Span<const int64_t> layers, int64_t averages) {
  Span span("adafactor");
  const bool with_moment = b1 >= 0;
  const size_t moment = factored ? 4 : 3, average = moment + (with_moment ? 1 : 0);
  auto lists = lists_of(args, rets, average + (averages != 0 ? 1 : 0));
  if (lists.has_error()) return lists.error();
  const float* r = rates.typed_data();
  if (r[4] == 0) return ffi::Error::Success();
  const FactoredGradients gradients{limit_of(max_value), r[3]};
  update_factored(pool, args, *lists, layers, factored, [&](FactoredWave& wave) {
    wave.pass(
        [&](FactoredPart& part) { sum_squares(part, gradients, static_cast<float>(eps), wave.numbers(part, 0)); });
    wave.take_sums(2, factored ? 3 : 2, r[1], r[2]);
    wave.pass([&](FactoredPart& part) {
      sum_scaled_squares(part, gradients, wave.numbers(part, 0), relative ? wave.numbers(part, 1) : nullptr);
    });
    const std::vector<float> updates = wave.root_mean_squares(&FactoredPart::updates);
    std::vector<float> sizes = wave.root_mean_squares(&FactoredPart::weights);
    for (float& size : sizes) size = (relative ? std::max(size, static_cast<float>(least_size)) : 1) * r[0];
    wave.pass([&](FactoredPart& part) {
      const float size = sizes[part.layer], large = updates[part.layer] / static_cast<float>(clip_threshold);
      const AdafactorStep step{gradients, size / std::max(large, 1.0f), static_cast<float>(b1),
                               static_cast<float>(weight_decay) * size};
      float* p = wave.numbers(part, 1);
      move_by_factors(step, part, wave.numbers(part, 0), p, with_moment ? wave.numbers(part, moment) : nullptr);
      if (averages != 0) move_averages(r[5], p, wave.numbers(part, average), part.size());
    });
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kAdafactor, adafactor_kernel,
                       update_binding()
                           .Attr<double>("eps")
                           .Attr<double>("least_size")
                           .Attr<double>("clip_threshold")
                           .Attr<double>("b1")
                           .Attr<double>("weight_decay")
                           .Attr<double>("max_value")
                           .Attr<bool>("relative")
                           .Attr<bool>("factored")
                           .Attr<ffi::Span<const int64_t>>("layers")
                           .Attr<int64_t>("averages"));

}  // namespace

void* adafactor_handler() { return reinterpret_cast<void*>(kAdafactor); }

}  // namespace md
