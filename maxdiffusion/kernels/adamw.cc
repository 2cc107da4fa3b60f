// AdamW and moving averages on the CPU, many parameters per call. XLA spends about 20 ms of compilation on every
// parameter's update and norm, a third of a UNet's whole compile time; here compile time does not grow with the number
// of parameters. Source: Loshchilov and Hutter 2019.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/update.h"

namespace md {
namespace {

struct Options {
  float b1, b2, eps, weight_decay, max_value;
};
/// Scalars of this update; `scale` clips the global norm.
struct Scalars {
  float lr, correction1, correction2, scale;
};

/// Sum of squares in separate lanes, so that vectorization does not reorder a sum.
MD_VECTORIZED double sum_of_squares(const float* g, int64_t n, float max_value) {
  constexpr int64_t kLanes = 64;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) {
      const float v = limited(g[i + j], max_value);
      lanes[j] += v * v;
    }
  double sum = 0;
  for (float lane : lanes) sum += static_cast<double>(lane);
  for (; i < n; ++i) {
    const float v = limited(g[i], max_value);
    sum += static_cast<double>(v * v);
  }
  return sum;
}

/// Updates p, m and v in place.
MD_VECTORIZED void update(const Options& o, const Scalars& s, const float* __restrict g, float* __restrict p,
                          float* __restrict m, float* __restrict v, int64_t n) {
  const float b1 = o.b1, b2 = o.b2, new1 = 1 - o.b1, new2 = 1 - o.b2, by1 = 1 / s.correction1, by2 = 1 / s.correction2,
              eps = o.eps, decay = o.weight_decay, max_value = o.max_value, scale = s.scale, lr = s.lr;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float grad = limited(g[i], max_value) * scale;
    const float first = m[i] * b1 + grad * new1;
    const float second = v[i] * b2 + grad * grad * new2;
    const float old = p[i];
    const float direction = first * by1 / (std::sqrt(second * by2) + eps) + old * decay;
    p[i] = old - direction * lr;
    m[i] = first;
    v[i] = second;
  }
}

/// Partial sums are added in order, so that the result does not depend on the assignment to threads.
double total_of_squares(ffi::ThreadPool& pool, const Arrays& arrays, float max_value) {
  const auto chunks = chunks_of(arrays.sizes);
  std::vector<double> sums(chunks.size());
  parallel_for(pool, static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const Chunk& chunk = chunks[static_cast<size_t>(i)];
    const float* data = static_cast<const float*>(arrays.data[chunk.array]) + chunk.start;
    sums[static_cast<size_t>(i)] = sum_of_squares(data, chunk.size, max_value);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

ffi::Error sum_of_squares_kernel(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::Result<ffi::Buffer<ffi::F32>> out,
                                 double max_value) {
  Span span("sum of squares");
  auto arrays = arrays_of(args, 0, args.size());
  if (arrays.has_error()) return arrays.error();
  float* sums = out->typed_data();
  sums[0] = static_cast<float>(total_of_squares(pool, *arrays, kNoLimit));
  sums[1] =
      max_value > 0 ? static_cast<float>(total_of_squares(pool, *arrays, static_cast<float>(max_value))) : sums[0];
  return ffi::Error::Success();
}

ffi::Error adamw_kernel(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rates, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, double b1, double b2, double eps, double weight_decay,
                        double max_value, int64_t averages) {
  Span span("adamw");
  auto lists = lists_of(args, rets, averages != 0 ? 5 : 4);  // gradients, parameters, moments, averages
  if (lists.has_error()) return lists.error();
  const Options o{static_cast<float>(b1), static_cast<float>(b2), static_cast<float>(eps),
                  static_cast<float>(weight_decay), limit_of(max_value)};
  const float* r = rates.typed_data();
  if (r[4] == 0) return ffi::Error::Success();
  const Scalars s{r[0], r[1], r[2], r[3]};
  update_all(pool, *lists, 4, r[5],
             [&](const auto& part, int64_t n) { update(o, s, part(0), part(1), part(2), part(3), n); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kSumOfSquares, sum_of_squares_kernel,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().Ret<ffi::Buffer<ffi::F32>>().Attr<double>("max_value"));

XLA_FFI_DEFINE_HANDLER(kAdamw, adamw_kernel,
                       update_binding()
                           .Attr<double>("b1")
                           .Attr<double>("b2")
                           .Attr<double>("eps")
                           .Attr<double>("weight_decay")
                           .Attr<double>("max_value")
                           .Attr<int64_t>("averages"));

}  // namespace

void* sum_of_squares_handler() { return reinterpret_cast<void*>(kSumOfSquares); }
void* adamw_handler() { return reinterpret_cast<void*>(kAdamw); }

}  // namespace md
