// Sums of two arrays on the CPU: residual connections, sums of cotangents, and biases. XLA has no bf16 loops: it
// widens, adds and rounds, and also writes the f32 values if another loop reads them.

#include <algorithm>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

template <class T, class U>
MD_VECTORIZED void add(const T* a, const U* b, int64_t n, T* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y[i], load(a[i]) + load(b[i]));
}

/// y = a + b. Rows have `width` elements; each row of b is added to `rows_per_b` consecutive rows of a.
template <class T, class U>
void add_all(ffi::ThreadPool& pool, const T* a, int64_t rows, int64_t width, const U* b, int64_t rows_per_b, T* y) {
  const int64_t most = std::max<int64_t>((int64_t{1} << 16) / width, 1);
  parallel_for(pool, (rows + most - 1) / most, [&](int64_t i) {
    for (int64_t r = i * most; r < std::min(rows, (i + 1) * most); ++r)
      add(a + r * width, b + r / rows_per_b * width, width, y + r * width);
  });
}

ffi::Error add_kernel(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> y) {
  Span span("add");
  const auto size = static_cast<int64_t>(a.element_count()), size_of_b = static_cast<int64_t>(b.element_count());
  const bool same_size = size == size_of_b;
  const int64_t width =
      same_size || a.dimensions().size() == 0 ? std::min<int64_t>(size, 1 << 14) : a.dimensions().back();
  if (a.element_type() != y->element_type() || size != static_cast<int64_t>(y->element_count()) || width == 0 ||
      (!same_size && (size_of_b % width != 0 || size % size_of_b != 0)))
    return ffi::Error::InvalidArgument("md_add: b does not fit to the rows of a, or y is not like a");
  bool known = true;
  auto with = [&](auto* from, auto* addend) {
    auto* to = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(from)>>*>(y->untyped_data());
    const int64_t rows = size / width, rest = size % width;
    add_all(pool, from, rows, width, addend, same_size ? 1 : size / size_of_b, to);
    if (rest > 0) add(from + rows * width, addend + rows * width, rest, to + rows * width);
  };
  auto with_b = [&](auto* from) {
    if (b.element_type() == ffi::F32)
      with(from, static_cast<const float*>(b.untyped_data()));
    else if (b.element_type() == ffi::BF16)
      with(from, static_cast<const uint16_t*>(b.untyped_data()));
    else
      known = false;
  };
  if (a.element_type() == ffi::F32)
    with_b(static_cast<const float*>(a.untyped_data()));
  else if (a.element_type() == ffi::BF16)
    with_b(static_cast<const uint16_t*>(a.untyped_data()));
  else
    known = false;
  return known ? ffi::Error::Success() : ffi::Error::InvalidArgument("md_add: the arrays are not f32 or bf16");
}

XLA_FFI_DEFINE_HANDLER(
    kAdd, add_kernel,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace

void* add_handler() { return reinterpret_cast<void*>(kAdd); }

}  // namespace md
