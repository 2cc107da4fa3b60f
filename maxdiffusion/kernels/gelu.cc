// GELU and its approximations on the CPU, plain or gated, and their gradients. XLA compiles several loops for each,
// with intermediate arrays in memory.

#include <cmath>
#include <string_view>
#include <type_traits>
#include <vector>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

/// For y = g·share(g): the share, and the derivative of y.
struct Gate {
  float share, slope;
};

/// Φ(g) = erfc(−g/√2)/2. For z = |g|/√2, erfc(z) = exp(−z²)·t·P(t) with t = 1/(1 + c·z). P is the minimax polynomial of
/// its degree for the relative error up to z = 8: 6e-8, or 2e-4 if the result is rounded to bf16. Coefficients are
/// those of t·P(t)/2.
struct ByErf {
  template <class T>
  [[gnu::always_inline]] static Gate at(float g) {
    constexpr bool for_bf16 = std::is_same_v<T, uint16_t>;
    constexpr float kC = (for_bf16 ? 0.7f : 0.425f) * 0.70710678118654752f;
    const float t = 1.0f / (1.0f + kC * std::abs(g));
    float p;
    if constexpr (for_bf16) {
      p = -1.2523557000e-1f;
      p = p * t + 2.5126420385e-1f;
      p = p * t + 1.7468892590e-1f;
      p = p * t + 1.9918340555e-1f;
    } else {
      p = 3.7256960650e-2f;
      p = p * t - 1.6293124260e-1f;
      p = p * t + 2.1482912890e-1f;
      p = p * t - 6.1865890635e-2f;
      p = p * t + 1.3303190890e-1f;
      p = p * t + 9.8660903250e-2f;
      p = p * t + 1.2119750625e-1f;
      p = p * t + 1.1982072755e-1f;
    }
    const float decay = vector_exp2<T>(-0.5f * kLog2E * g * g);  // exp(−g²/2)
    const float tail = p * t * decay, share = g < 0 ? tail : 1.0f - tail;
    return {share, share + g * (0.39894228040143268f * decay)};
  }
};
/// (1 + tanh(u))/2 is the sigmoid of 2u: here of 2·√(2/π)·(g + 0.044715·g³).
struct ByTanh {
  template <class>
  [[gnu::always_inline]] static Gate at(float g) {
    constexpr float kScale = 1.59576912160573072f, kCube = 0.044715f;
    const float share = vector_sigmoid(kScale * g * (1.0f + kCube * g * g));
    return {share, share + g * share * (1.0f - share) * kScale * (1.0f + 3.0f * kCube * g * g)};
  }
};
/// The sigmoid of 1.702·g.
struct BySigmoid {
  template <class>
  [[gnu::always_inline]] static Gate at(float g) {
    const float share = vector_sigmoid(1.702f * g);
    return {share, share + g * share * (1.0f - share) * 1.702f};
  }
};

/// Rows of x have the width of y's or, if gated, twice that: values, then gates.
template <class By, bool gated, class T>
MD_VECTORIZED void forward(const T* x, int64_t rows, int64_t width, T* y) {
  const int64_t gates = gated ? width : 0;
  for (int64_t i = 0; i < rows; ++i, x += width + gates, y += width)
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const float g = load(x[gates + c]);
      store(y[c], (gated ? load(x[c]) : 1.0f) * (g * By::template at<T>(g).share));
    }
}

template <class By, bool gated, class T>
MD_VECTORIZED void backward(const T* x, const T* dy, int64_t rows, int64_t width, T* dx) {
  const int64_t gates = gated ? width : 0;
  for (int64_t i = 0; i < rows; ++i, x += width + gates, dx += width + gates, dy += width)
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const float g = load(x[gates + c]), d = load(dy[c]);
      const Gate at = By::template at<T>(g);
      if constexpr (gated) {
        const float a = load(x[c]);
        store(dx[c], d * (g * at.share));
        store(dx[width + c], d * a * at.slope);
      } else {
        store(dx[c], d * at.slope);
      }
    }
}

/// Calls f(first row, number of rows) for chunks of rows of about 32,768 elements.
template <class F>
void each_shard(ffi::ThreadPool& pool, int64_t rows, int64_t width, const F& f) {
  const int64_t most = std::max<int64_t>((int64_t{1} << 15) / width, 1);
  parallel_for(pool, (rows + most - 1) / most, [&](int64_t i) { f(i * most, std::min(most, rows - i * most)); });
}

/// Calls run with null pointers to the kind of gate and to the element type; returns an error for unknown ones.
template <class Run>
ffi::Error with_types(std::string_view by, ffi::DataType type, const Run& run) {
  auto with_type = [&](auto* gate) {
    if (type == ffi::F32)
      run(gate, static_cast<float*>(nullptr));
    else
      run(gate, static_cast<uint16_t*>(nullptr));
    return ffi::Error::Success();
  };
  if (type != ffi::F32 && type != ffi::BF16) return ffi::Error::InvalidArgument("md_gelu: x is not f32 or bf16");
  if (by == "erf") return with_type(static_cast<ByErf*>(nullptr));
  if (by == "tanh") return with_type(static_cast<ByTanh*>(nullptr));
  if (by == "sigmoid") return with_type(static_cast<BySigmoid*>(nullptr));
  return ffi::Error::InvalidArgument("md_gelu: by is not erf, tanh or sigmoid");
}

/// Whether x (or its gradient) has the rows of y (or dy): its last axis is twice as long if gated.
bool fits(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, bool gated) {
  const size_t times = gated ? 2 : 1;
  return x.element_type() == y.element_type() && x.element_count() == times * y.element_count() &&
         y.dimensions().size() > 0 && x.dimensions().back() == static_cast<int64_t>(times) * y.dimensions().back();
}

ffi::Error gelu_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, std::string_view by,
                       bool gated) {
  Span span("gelu");
  if (!fits(x, *y, gated)) return ffi::Error::InvalidArgument("md_gelu: rows of x and y do not fit each other");
  const int64_t width = y->dimensions().back(), size = static_cast<int64_t>(y->element_count()),
                of_x = gated ? 2 * width : width;
  return with_types(by, x.element_type(), [&]<class By, class T>(By*, T*) {
    const auto* from = static_cast<const T*>(x.untyped_data());
    auto* to = static_cast<T*>(y->untyped_data());
    each_shard(pool, size / width, width, [&](int64_t first, int64_t rows) {
      const auto run = gated ? forward<By, true, T> : forward<By, false, T>;
      run(from + first * of_x, rows, width, to + first * width);
    });
  });
}

ffi::Error gelu_grad_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx,
                            std::string_view by, bool gated) {
  Span span("gelu gradient");
  if (!fits(x, dy, gated) || !fits(*dx, dy, gated))
    return ffi::Error::InvalidArgument("md_gelu_grad: rows of x, dy and dx do not fit each other");
  const int64_t width = dy.dimensions().back(), size = static_cast<int64_t>(dy.element_count()),
                of_x = gated ? 2 * width : width;
  return with_types(by, x.element_type(), [&]<class By, class T>(By*, T*) {
    const auto* from = static_cast<const T*>(x.untyped_data());
    const auto* cotangents = static_cast<const T*>(dy.untyped_data());
    auto* to = static_cast<T*>(dx->untyped_data());
    each_shard(pool, size / width, width, [&](int64_t first, int64_t rows) {
      const auto run = gated ? backward<By, true, T> : backward<By, false, T>;
      run(from + first * of_x, cotangents + first * width, rows, width, to + first * of_x);
    });
  });
}

XLA_FFI_DEFINE_HANDLER(kGelu, gelu_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("by")
                           .Attr<bool>("gated"));
XLA_FFI_DEFINE_HANDLER(kGeluGrad, gelu_grad_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("by")
                           .Attr<bool>("gated"));

}  // namespace

void* gelu_handler() { return reinterpret_cast<void*>(kGelu); }
void* gelu_grad_handler() { return reinterpret_cast<void*>(kGeluGrad); }

}  // namespace md
