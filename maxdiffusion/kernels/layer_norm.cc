// Layer norm over the last axis on the CPU; a kernel for the same reason as group norm.

#include <algorithm>
#include <cmath>
#include <vector>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

constexpr int64_t kRows = 32;  // per chunk; the backward pass adds the rows of a chunk in float, chunks in double

template <class T>
MD_VECTORIZED void forward_rows(const T* x, const float* w, const float* b, T* y, float* mean, float* rstd,
                                int64_t rows, int64_t width, float eps) {
  const float part = 1.0f / static_cast<float>(width);
  for (int64_t i = 0; i < rows; ++i, x += width, y += width) {
    float sum = 0, off = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < width; ++c) sum += load(x[c]);
    const float near = sum * part;
#pragma omp simd reduction(+ : off, squares)
    for (int64_t c = 0; c < width; ++c) {
      const float d = load(x[c]) - near;
      off += d;
      squares += d * d;
    }
    off *= part;  // rounding error of the mean
    const float variance = squares * part - off * off, m = near + off;
    const float r = 1.0f / std::sqrt((variance < 0 ? 0.0f : variance) + eps);
    mean[i] = m;
    rstd[i] = r;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) store(y[c], (load(x[c]) - m) * r * w[c] + b[c]);
  }
}

/// Adds to dw and db.
template <class T>
MD_VECTORIZED void backward_rows(const T* x, const T* dy, const float* w, const float* mean, const float* rstd, T* dx,
                                 float* dw, float* db, int64_t rows, int64_t width) {
  const float part = 1.0f / static_cast<float>(width);
  for (int64_t i = 0; i < rows; ++i, x += width, dy += width, dx += width) {
    const float m = mean[i], r = rstd[i];
    float level = 0, slope = 0;
#pragma omp simd reduction(+ : level, slope)
    for (int64_t c = 0; c < width; ++c) {
      const float n = (load(x[c]) - m) * r, g = load(dy[c]) * w[c];
      level += g;
      slope += g * n;
    }
    level *= part;
    slope *= part;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const float n = (load(x[c]) - m) * r, d = load(dy[c]);
      dw[c] += d * n;
      db[c] += d;
      store(dx[c], r * (d * w[c] - level - n * slope));
    }
  }
}

struct Sizes {
  int64_t rows, width;
  int64_t chunks() const { return (rows + kRows - 1) / kRows; }
};
Sizes sizes_of(const ffi::AnyBuffer& x) {
  const auto width = static_cast<int64_t>(x.dimensions().back());
  return {static_cast<int64_t>(x.element_count()) / width, width};
}

template <class T>
void forward(ffi::ThreadPool& pool, const Sizes& s, double eps, const void* x, const float* w, const float* b, void* y,
             float* mean, float* rstd) {
  parallel_for(pool, s.chunks(), [&](int64_t i) {
    const int64_t row = i * kRows, at = row * s.width;
    forward_rows(static_cast<const T*>(x) + at, w, b, static_cast<T*>(y) + at, mean + row, rstd + row,
                 std::min(kRows, s.rows - row), s.width, static_cast<float>(eps));
  });
}

/// sums: dw, then db, of every chunk.
template <class T>
void backward(ffi::ThreadPool& pool, const Sizes& s, const void* x, const void* dy, const float* w, const float* mean,
              const float* rstd, void* dx, float* sums) {
  parallel_for(pool, s.chunks(), [&](int64_t i) {
    const int64_t row = i * kRows, at = row * s.width;
    float* dw = sums + 2 * i * s.width;
    backward_rows(static_cast<const T*>(x) + at, static_cast<const T*>(dy) + at, w, mean + row, rstd + row,
                  static_cast<T*>(dx) + at, dw, dw + s.width, std::min(kRows, s.rows - row), s.width);
  });
}

using F32 = ffi::Buffer<ffi::F32>;

ffi::Error forward_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, F32 w, F32 b, ffi::Result<ffi::AnyBuffer> y,
                          ffi::Result<F32> mean, ffi::Result<F32> rstd, double eps) {
  Span span("layer norm");
  const auto run = x.element_type() == ffi::BF16 ? forward<uint16_t> : forward<float>;
  run(pool, sizes_of(x), eps, x.untyped_data(), w.typed_data(), b.typed_data(), y->untyped_data(), mean->typed_data(),
      rstd->typed_data());
  return ffi::Error::Success();
}

ffi::Error backward_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy, F32 w, F32 mean, F32 rstd,
                           ffi::Result<ffi::AnyBuffer> dx, ffi::Result<F32> dw, ffi::Result<F32> db) {
  Span span("layer norm gradient");
  const Sizes s = sizes_of(x);
  const auto both = static_cast<size_t>(2 * s.width);
  std::vector<float> sums(both * static_cast<size_t>(s.chunks()));
  const auto run = x.element_type() == ffi::BF16 ? backward<uint16_t> : backward<float>;
  run(pool, s, x.untyped_data(), dy.untyped_data(), w.typed_data(), mean.typed_data(), rstd.typed_data(),
      dx->untyped_data(), sums.data());
  std::vector<double> totals(both);
  for (size_t at = 0; at < sums.size(); at += both)
    for (size_t c = 0; c < both; ++c) totals[c] += static_cast<double>(sums[at + c]);
  std::copy_n(totals.begin(), s.width, dw->typed_data());
  std::copy_n(totals.begin() + s.width, s.width, db->typed_data());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kForward, forward_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<F32>()
                           .Ret<F32>()
                           .Attr<double>("eps"));

XLA_FFI_DEFINE_HANDLER(kBackward, backward_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<F32>()
                           .Ret<F32>());

}  // namespace

void* layer_norm_handler() { return reinterpret_cast<void*>(kForward); }
void* layer_norm_grad_handler() { return reinterpret_cast<void*>(kBackward); }

}  // namespace md
