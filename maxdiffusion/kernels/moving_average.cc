// Exponential moving averages of parameters on the CPU, many per call; for the same reason as AdamW's.

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

MD_VECTORIZED void average(float keep, float* __restrict averages, const float* __restrict array, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) averages[i] = array[i] + (averages[i] - array[i]) * keep;
}

void average_all(ffi::ThreadPool& pool, float keep, const Arrays& averages, const Arrays& arrays) {
  const auto pieces = pieces_of(averages.sizes);
  parallel_for(pool, static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[static_cast<size_t>(i)];
    average(keep, static_cast<float*>(averages.data[piece.array]) + piece.start,
            static_cast<const float*>(arrays.data[piece.array]) + piece.start, piece.size);
  });
}

ffi::Error moving_average_kernel(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rates, ffi::RemainingArgs args,
                                 ffi::RemainingRets rets) {
  Span span("moving average");
  const size_t n = rets.size();
  if (args.size() != 2 * n) return ffi::Error::InvalidArgument("md_moving_average: operands are not two lists");
  auto averages = arrays_of(args, 0, n), arrays = arrays_of(args, n, n);
  if (averages.has_error()) return averages.error();
  if (arrays.has_error()) return arrays.error();
  if (auto error = move_to_results(*averages, rets, 0); error.failure()) return error;
  const float* r = rates.typed_data();
  if (r[1] != 0) average_all(pool, r[0], *averages, *arrays);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kMovingAverage, moving_average_kernel,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().RemainingArgs().RemainingRets());

}  // namespace

void* moving_average_handler() { return reinterpret_cast<void*>(kMovingAverage); }

}  // namespace md
