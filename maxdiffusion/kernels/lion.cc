// Lion on the CPU, many parameters per call, as in adamw.cc. Source: Chen et al. 2023.

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/update.h"

namespace md {
namespace {

struct LionStep {
  float b1, b2, weight_decay, max_value, lr, scale;
};

MD_VECTORIZED void move_by_signs(const LionStep& s, const float* __restrict g, float* __restrict p, float* __restrict m,
                                 int64_t n) {
  const float b1 = s.b1, b2 = s.b2, new1 = 1 - s.b1, new2 = 1 - s.b2, decay = s.weight_decay, max_value = s.max_value,
              scale = s.scale, lr = s.lr;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float grad = limited(g[i], max_value) * scale, along = m[i] * b1 + grad * new1;
    const float sign = (along > 0 ? 1.0f : 0.0f) - (along < 0 ? 1.0f : 0.0f);
    p[i] = p[i] - (sign + p[i] * decay) * lr;
    m[i] = m[i] * b2 + grad * new2;
  }
}

ffi::Error lion_kernel(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rates, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, double b1, double b2, double weight_decay, double max_value,
                       int64_t averages) {
  Span span("lion");
  auto lists = lists_of(args, rets, averages != 0 ? 4 : 3);
  if (lists.has_error()) return lists.error();
  const float* r = rates.typed_data();
  if (r[2] == 0) return ffi::Error::Success();
  const LionStep step{static_cast<float>(b1),
                      static_cast<float>(b2),
                      static_cast<float>(weight_decay),
                      limit_of(max_value),
                      r[0],
                      r[1]};
  update_all(pool, *lists, 3, r[3],
             [&](const auto& part, int64_t n) { move_by_signs(step, part(0), part(1), part(2), n); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kLion, lion_kernel,
                       update_binding()
                           .Attr<double>("b1")
                           .Attr<double>("b2")
                           .Attr<double>("weight_decay")
                           .Attr<double>("max_value")
                           .Attr<int64_t>("averages"));

}  // namespace

void* lion_handler() { return reinterpret_cast<void*>(kLion); }

}  // namespace md
