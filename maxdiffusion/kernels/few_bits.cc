// Numbers of few bits as float32 or bfloat16 on the CPU: where a product is to read them. XLA would write them as
// float32 first, and read NF4's from tables element by element.

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "maxdiffusion/base/dynamic_map.h"
#include "maxdiffusion/base/half.h"
#include "maxdiffusion/base/nf4.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/base/vectorized.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"

namespace md {
namespace {

/// The numbers of all bytes.
template <class T>
using Table = std::array<T, 256>;

template <class T>
const Table<T>& numbers_of(DType type) {
  static const auto table = [](DType of) {
    Table<uint8_t> bytes;
    std::iota(bytes.begin(), bytes.end(), uint8_t{0});
    Table<float> numbers;
    convert_elements(of, bytes.data(), DType::f32, numbers.data(), bytes.size());
    Table<T> out;
    for (size_t i = 0; i < out.size(); ++i) store(out[i], numbers[i]);
    return out;
  };
  static const Table<T> s8 = table(DType::s8), f8 = table(DType::f8e4m3fn);
  return type == DType::s8 ? s8 : f8;
}

/// Calls f(first, one past the last) for parts of n elements.
void by_parts(ffi::ThreadPool& pool, int64_t n, int64_t part, const std::function<void(int64_t, int64_t)>& f) {
  parallel_for(pool, (n + part - 1) / part, [&](int64_t i) { f(i * part, std::min(n, (i + 1) * part)); });
}

template <class T>
void widen(ffi::ThreadPool& pool, const uint8_t* x, DType type, int64_t n, T* y) {
  const T* table = numbers_of<T>(type).data();
  by_parts(pool, n, 1 << 17, [=](int64_t from, int64_t end) {
    for (int64_t i = from; i < end; ++i) y[i] = table[x[i]];
  });
}

ffi::Error widen_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  Span span("widen");
  const auto n = static_cast<int64_t>(x.element_count());
  const bool s8 = x.element_type() == ffi::S8, f8 = x.element_type() == ffi::F8E4M3FN;
  if ((!s8 && !f8) || n != static_cast<int64_t>(y->element_count()))
    return ffi::Error::InvalidArgument("md_widen: x is neither s8 nor f8e4m3fn, or y is not of its size");
  const auto* from = static_cast<const uint8_t*>(x.untyped_data());
  const DType type = s8 ? DType::s8 : DType::f8e4m3fn;
  if (y->element_type() == ffi::F32)
    widen(pool, from, type, n, static_cast<float*>(y->untyped_data()));
  else if (y->element_type() == ffi::BF16)
    widen(pool, from, type, n, static_cast<uint16_t*>(y->untyped_data()));
  else
    return ffi::Error::InvalidArgument("md_widen: y is neither f32 nor bf16");
  return ffi::Error::Success();
}

struct Nf4Arrays {
  const uint8_t *codes, *scales;
  const float* nested;
  float mean;
};

/// The two numbers of each byte, without their scale.
const std::array<float, 512>& nf4_pairs() {
  static const auto pairs = [] {
    std::array<float, 512> out{};
    for (size_t byte = 0; byte < 256; ++byte) out[2 * byte] = kNf4[byte >> 4], out[2 * byte + 1] = kNf4[byte & 15];
    return out;
  }();
  return pairs;
}

MD_VECTORIZED void times(const float* x, float by, float* y) {
  for (int64_t i = 0; i < kNf4Block; ++i) y[i] = x[i] * by;
}
MD_VECTORIZED void times(const float* x, float by, uint16_t* y) {
  for (int64_t i = 0; i < kNf4Block; ++i) y[i] = float_to_bf16(x[i] * by);
}

template <class T>
void widen_nf4(ffi::ThreadPool& pool, const Nf4Arrays& a, int64_t blocks, T* y) {
  by_parts(pool, blocks, (1 << 17) / kNf4Block, [=](int64_t from, int64_t end) {
    const std::array<float, 256>& map = dynamic_map(true);
    const float* pairs = nf4_pairs().data();
    std::array<float, kNf4Block> numbers;
    for (int64_t b = from; b < end; ++b) {
      const uint8_t* codes = a.codes + b * kNf4Block / 2;
      for (size_t i = 0; i < numbers.size() / 2; ++i)
        std::memcpy(numbers.data() + 2 * i, pairs + size_t{2} * codes[i], 2 * sizeof(float));
      times(numbers.data(), map[a.scales[b]] * a.nested[b / kNf4NestedBlock] + a.mean, y + b * kNf4Block);
    }
  });
}

ffi::Error widen_nf4_kernel(ffi::ThreadPool pool, ffi::Buffer<ffi::U8> codes, ffi::Buffer<ffi::U8> scales,
                            ffi::Buffer<ffi::F32> nested, ffi::Buffer<ffi::F32> mean, ffi::Result<ffi::AnyBuffer> y) {
  Span span("widen nf4");
  const auto blocks = static_cast<int64_t>(scales.element_count());
  if (static_cast<int64_t>(y->element_count()) != blocks * kNf4Block ||
      static_cast<int64_t>(codes.element_count()) != blocks * kNf4Block / 2 || mean.element_count() != 1 ||
      static_cast<int64_t>(nested.element_count()) != (blocks + kNf4NestedBlock - 1) / kNf4NestedBlock)
    return ffi::Error::InvalidArgument("md_widen_nf4: the arrays are not of one matrix");
  const Nf4Arrays a{codes.typed_data(), scales.typed_data(), nested.typed_data(), mean.typed_data()[0]};
  if (y->element_type() == ffi::F32)
    widen_nf4(pool, a, blocks, static_cast<float*>(y->untyped_data()));
  else if (y->element_type() == ffi::BF16)
    widen_nf4(pool, a, blocks, static_cast<uint16_t*>(y->untyped_data()));
  else
    return ffi::Error::InvalidArgument("md_widen_nf4: y is neither f32 nor bf16");
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kWiden, widen_kernel,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kWidenNf4, widen_nf4_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::Buffer<ffi::U8>>()
                           .Arg<ffi::Buffer<ffi::U8>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

void* widen_handler() { return reinterpret_cast<void*>(kWiden); }
void* widen_nf4_handler() { return reinterpret_cast<void*>(kWidenNf4); }

}  // namespace md
