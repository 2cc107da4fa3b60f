// GEGLU on the CPU: y = a · gelu(g) for the halves a, g of every row, and its gradient. In bf16 XLA writes the values
// between its loops in f32, and reads them again.

#include <cmath>
#include <vector>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

/// Φ(x) = (1 + erf(x/√2))/2 and φ(x), its slope.
struct Gauss {
  float below, density;
};
/// Within 1.2e-7 of itself. Source of the polynomial: Press et al., Numerical Recipes, erfcc.
[[gnu::always_inline]] inline Gauss gauss(float x) {
  const float z = std::abs(x) * 0.70710678118654752f;
  const float t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const float half_tail = 0.5f * t * vector_exp(p - z * z);
  return {x < 0 ? half_tail : 1.0f - half_tail, 0.39894228040143268f * vector_exp(-0.5f * x * x)};
}

template <class T>
MD_VECTORIZED void forward(const T* x, int64_t rows, int64_t width, T* y) {
  for (int64_t i = 0; i < rows; ++i, x += 2 * width, y += width)
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const float g = load(x[width + c]);
      store(y[c], load(x[c]) * (g * gauss(g).below));
    }
}

template <class T>
MD_VECTORIZED void backward(const T* x, const T* dy, int64_t rows, int64_t width, T* dx) {
  for (int64_t i = 0; i < rows; ++i, x += 2 * width, dx += 2 * width, dy += width)
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const float a = load(x[c]), g = load(x[width + c]), d = load(dy[c]);
      const Gauss at = gauss(g);
      store(dx[c], d * (g * at.below));
      store(dx[width + c], d * a * (at.below + g * at.density));
    }
}

/// f(first row, rows) for pieces of rows of about 32,768 elements.
template <class F>
void each_piece(ffi::ThreadPool& pool, int64_t rows, int64_t width, const F& f) {
  const int64_t most = std::max<int64_t>((int64_t{1} << 15) / width, 1);
  parallel_for(pool, (rows + most - 1) / most, [&](int64_t i) { f(i * most, std::min(most, rows - i * most)); });
}

/// run(a pointer to the type of the elements), or an error.
template <class Run>
ffi::Error with_type(ffi::DataType type, const Run& run) {
  if (type == ffi::F32)
    run(static_cast<float*>(nullptr));
  else if (type == ffi::BF16)
    run(static_cast<uint16_t*>(nullptr));
  else
    return ffi::Error::InvalidArgument("md_gated_gelu: x is not f32 or bf16");
  return ffi::Error::Success();
}

ffi::Error gated_gelu_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  Span span("gated gelu");
  const auto width = static_cast<int64_t>(y->dimensions().back()), size = static_cast<int64_t>(y->element_count());
  if (y->element_type() != x.element_type() || static_cast<int64_t>(x.element_count()) != 2 * size ||
      x.dimensions().back() != 2 * width)
    return ffi::Error::InvalidArgument("md_gated_gelu: rows of y are not half as long as those of x");
  return with_type(x.element_type(), [&]<class T>(T*) {
    const auto* from = static_cast<const T*>(x.untyped_data());
    auto* to = static_cast<T*>(y->untyped_data());
    each_piece(pool, size / width, width, [&](int64_t first, int64_t rows) {
      forward(from + 2 * first * width, rows, width, to + first * width);
    });
  });
}

ffi::Error gated_gelu_grad_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                                  ffi::Result<ffi::AnyBuffer> dx) {
  Span span("gated gelu gradient");
  const auto width = static_cast<int64_t>(dy.dimensions().back()), size = static_cast<int64_t>(dy.element_count());
  if (dy.element_type() != x.element_type() || dx->element_type() != x.element_type() ||
      static_cast<int64_t>(x.element_count()) != 2 * size || dx->element_count() != x.element_count() ||
      x.dimensions().back() != 2 * width)
    return ffi::Error::InvalidArgument("md_gated_gelu_grad: rows of dy are not half as long as those of x");
  return with_type(x.element_type(), [&]<class T>(T*) {
    const auto* from = static_cast<const T*>(x.untyped_data());
    const auto* cotangents = static_cast<const T*>(dy.untyped_data());
    auto* to = static_cast<T*>(dx->untyped_data());
    each_piece(pool, size / width, width, [&](int64_t first, int64_t rows) {
      backward(from + 2 * first * width, cotangents + first * width, rows, width, to + 2 * first * width);
    });
  });
}

XLA_FFI_DEFINE_HANDLER(kGatedGelu, gated_gelu_kernel,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(
    kGatedGeluGrad, gated_gelu_grad_kernel,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace

void* gated_gelu_handler() { return reinterpret_cast<void*>(kGatedGelu); }
void* gated_gelu_grad_handler() { return reinterpret_cast<void*>(kGatedGeluGrad); }

}  // namespace md
