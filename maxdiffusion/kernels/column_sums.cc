// Sums over the rows of an array on the CPU: gradients of biases. XLA compiles each to a window reduction and a loop.

#include <algorithm>
#include <vector>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

constexpr int64_t kRows = 128;  // per chunk, which is summed in float

template <class T>
MD_VECTORIZED void add_rows(const T* x, int64_t rows, int64_t width, float* sums) {
  std::fill_n(sums, width, 0.0f);
  for (int64_t i = 0; i < rows; ++i, x += width)
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) sums[c] += load(x[c]);
}

template <class T>
void sum(ffi::ThreadPool& pool, const T* x, int64_t groups, int64_t rows, int64_t width, float* y) {
  const int64_t chunks = (rows + kRows - 1) / kRows;
  std::vector<float> sums(static_cast<size_t>(groups * chunks * width));
  parallel_for(pool, groups * chunks, [&](int64_t i) {
    const int64_t first = i % chunks * kRows;
    add_rows(x + (i / chunks * rows + first) * width, std::min(kRows, rows - first), width, sums.data() + i * width);
  });
  std::vector<double> totals(static_cast<size_t>(width));
  for (int64_t g = 0; g < groups; ++g, y += width) {
    std::ranges::fill(totals, 0.0);
    for (int64_t i = g * chunks; i < (g + 1) * chunks; ++i)
      for (int64_t c = 0; c < width; ++c)
        totals[static_cast<size_t>(c)] += static_cast<double>(sums[static_cast<size_t>(i * width + c)]);
    for (int64_t c = 0; c < width; ++c) y[c] = static_cast<float>(totals[static_cast<size_t>(c)]);
  }
}

ffi::Error column_sums_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  Span span("column sums");
  const auto results = static_cast<int64_t>(y->element_count()), size = static_cast<int64_t>(x.element_count());
  const int64_t width = x.dimensions().size() == 0 ? 0 : x.dimensions().back();
  if (width == 0 || results == 0 || results % width != 0 || size % results != 0)
    return ffi::Error::InvalidArgument("md_column_sums: the result has not the rows of x");
  const int64_t groups = results / width, rows = size / results;
  if (x.element_type() == ffi::F32)
    sum(pool, static_cast<const float*>(x.untyped_data()), groups, rows, width, y->typed_data());
  else if (x.element_type() == ffi::BF16)
    sum(pool, static_cast<const uint16_t*>(x.untyped_data()), groups, rows, width, y->typed_data());
  else
    return ffi::Error::InvalidArgument("md_column_sums: x is not f32 or bf16");
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kColumnSums, column_sums_kernel,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::Buffer<ffi::F32>>());

}  // namespace

void* column_sums_handler() { return reinterpret_cast<void*>(kColumnSums); }

}  // namespace md
