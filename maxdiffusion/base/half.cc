#include "maxdiffusion/base/half.h"

#include <cmath>
#include <cstring>

#include "maxdiffusion/base/vectorized.h"

namespace md {
namespace {

template <class T>
double load(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return static_cast<double>(v);
}
template <class T>
void store(void* p, double value) {
  T v = static_cast<T>(value);
  std::memcpy(p, &v, sizeof v);
}

// A small float of 1 sign bit, E exponent bits and M mantissa bits. Infinity exists unless `finite_only` (f8e4m3fn,
// whose only special value is NaN, all ones).
struct Small {
  int e, m;
  bool finite_only;
};

uint32_t encode(Small f, double value) {
  const int bias = (1 << (f.e - 1)) - 1;
  const uint32_t sign = std::signbit(value) ? 1u << (f.e + f.m) : 0;
  const uint32_t all = (1u << (f.e + f.m)) - 1;
  const uint32_t infinity = ((1u << f.e) - 1) << f.m;
  if (std::isnan(value)) return sign | (f.finite_only ? all : infinity | (1u << (f.m - 1)));
  value = std::fabs(value);
  if (std::isinf(value)) return sign | (f.finite_only ? all : infinity);
  if (value == 0) return sign;
  int exponent;
  std::frexp(value, &exponent);  // value = 0.5…1 × 2^exponent
  int unbiased = std::max(exponent - 1, 1 - bias);
  double units = std::nearbyint(std::ldexp(value, f.m - unbiased));  // ties to even
  uint32_t bits;
  if (units < (1 << f.m)) {
    bits = static_cast<uint32_t>(units);  // subnormal
  } else {
    if (units >= (2 << f.m)) units /= 2, ++unbiased;
    bits = (static_cast<uint32_t>(unbiased + bias) << f.m) + (static_cast<uint32_t>(units) - (1u << f.m));
  }
  if (f.finite_only) return sign | (bits >= all ? all : bits);
  return sign | (bits >= infinity ? infinity : bits);
}

double decode(Small f, uint32_t bits) {
  const int bias = (1 << (f.e - 1)) - 1;
  const double sign = (bits >> (f.e + f.m)) & 1 ? -1 : 1;
  const uint32_t exponent = (bits >> f.m) & ((1u << f.e) - 1), mantissa = bits & ((1u << f.m) - 1);
  if (f.finite_only ? exponent == (1u << f.e) - 1 && mantissa == (1u << f.m) - 1 : exponent == (1u << f.e) - 1)
    return mantissa ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.m);
  return sign * std::ldexp(mantissa + (1u << f.m), static_cast<int>(exponent) - bias - f.m);
}

constexpr Small kF16{5, 10, false}, kE4M3{4, 3, true}, kE5M2{5, 2, false};

}  // namespace

// The same without branches, on the bits of a float.

struct F32 {
  using Bits = uint32_t;
  static uint32_t widened(uint32_t bits) { return bits; }
  static uint32_t narrowed(uint32_t bits) { return bits; }
};

struct Bf16 {
  using Bits = uint16_t;
  static uint32_t widened(uint32_t bits) { return bits << 16; }
  static uint32_t narrowed(uint32_t bits) {
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return (nan ? bits | 0x400000u : bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
};

/// `Small` with sizes known at compile time.
template <class B, int E, int M, bool kFiniteOnly>
struct SmallFloat {
  using Bits = B;
  static constexpr int kBias = (1 << (E - 1)) - 1;
  static constexpr uint32_t kAll = (1u << (E + M)) - 1, kInfinity = ((1u << E) - 1) << M;
  static constexpr uint32_t kNan = kFiniteOnly ? kAll : kInfinity | (1u << (M - 1));
  static constexpr uint32_t kExponents = uint32_t{127 - kBias} << 23;        // difference of the exponent biases
  static constexpr uint32_t kSpacing = uint32_t{127 + 1 - kBias - M} << 23;  // of subnormals, as a float

  static uint32_t widened(uint32_t bits) {
    const uint32_t x = bits & kAll, sign = (bits & (kAll + 1)) << (31 - E - M);
    const uint32_t normal = (x << (23 - M)) + kExponents;
    const float small = static_cast<float>(static_cast<int32_t>(x)) * std::bit_cast<float>(kSpacing);
    uint32_t y = x >= (1u << M) ? normal : std::bit_cast<uint32_t>(small);
    if (!kFiniteOnly) y = x == kInfinity ? 0x7f800000u : y;
    return x > (kFiniteOnly ? kAll - 1 : kInfinity) ? 0x7fc00000u : y | sign;
  }
  static uint32_t narrowed(uint32_t bits) {
    const uint32_t x = bits & 0x7fffffffu, sign = (bits >> (31 - E - M)) & (kAll + 1);
    const uint32_t normal = (x + ((1u << (22 - M)) - 1) + ((x >> (23 - M)) & 1) - kExponents) >> (23 - M);
    // A float as large as this has no bits below the spacing: the sum is rounded to it, ties to even.
    constexpr uint32_t kLarge = kSpacing + (23u << 23);
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(x) + std::bit_cast<float>(kLarge)) - kLarge;
    uint32_t y = x >= kExponents + (1u << 23) ? normal : small;
    constexpr uint32_t kMost = kFiniteOnly ? kAll : kInfinity;
    y = y > kMost ? kMost : y;
    return sign | (x > 0x7f800000u ? kNan : y);
  }
};

using F16 = SmallFloat<uint16_t, 5, 10, false>;
using E4M3 = SmallFloat<uint8_t, 4, 3, true>;
using E5M2 = SmallFloat<uint8_t, 5, 2, false>;

template <class From, class To>
MD_VECTORIZED void convert(const typename From::Bits* __restrict in, typename To::Bits* __restrict out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<typename To::Bits>(To::narrowed(From::widened(in[i])));
}

using Convert = void (*)(const void* in, void* out, size_t n);
template <class From, class To>
void convert_void(const void* in, void* out, size_t n) {
  convert<From, To>(static_cast<const typename From::Bits*>(in), static_cast<typename To::Bits*>(out), n);
}
template <class From>
Convert conversion_from(DType to) {
  switch (to) {
    case DType::f32: return convert_void<From, F32>;
    case DType::bf16: return convert_void<From, Bf16>;
    case DType::f16: return convert_void<From, F16>;
    case DType::f8e4m3fn: return convert_void<From, E4M3>;
    case DType::f8e5m2: return convert_void<From, E5M2>;
    default: return nullptr;
  }
}
/// A vectorized conversion; null if there is none.
Convert conversion(DType from, DType to) {
  switch (from) {
    case DType::f32: return conversion_from<F32>(to);
    case DType::bf16: return conversion_from<Bf16>(to);
    case DType::f16: return conversion_from<F16>(to);
    case DType::f8e4m3fn: return conversion_from<E4M3>(to);
    case DType::f8e5m2: return conversion_from<E5M2>(to);
    default: return nullptr;
  }
}

double load_element(DType t, const void* p) {
  switch (t) {
    case DType::pred: return load<uint8_t>(p) != 0;
    case DType::s8: return load<int8_t>(p);
    case DType::s16: return load<int16_t>(p);
    case DType::s32: return load<int32_t>(p);
    case DType::s64: return load<int64_t>(p);
    case DType::u8: return load<uint8_t>(p);
    case DType::u16: return load<uint16_t>(p);
    case DType::u32: return load<uint32_t>(p);
    case DType::u64: return load<uint64_t>(p);
    case DType::f8e4m3fn: return decode(kE4M3, *static_cast<const uint8_t*>(p));
    case DType::f8e5m2: return decode(kE5M2, *static_cast<const uint8_t*>(p));
    case DType::bf16: {
      uint16_t b;
      std::memcpy(&b, p, 2);
      return bf16_to_float(b);
    }
    case DType::f16: {
      uint16_t b;
      std::memcpy(&b, p, 2);
      return decode(kF16, b);
    }
    case DType::f32: return load<float>(p);
    case DType::f64: return load<double>(p);
  }
  return 0;
}

void store_element(DType t, void* p, double v) {
  switch (t) {
    case DType::pred: return store<uint8_t>(p, v != 0);
    case DType::s8: return store<int8_t>(p, v);
    case DType::s16: return store<int16_t>(p, v);
    case DType::s32: return store<int32_t>(p, v);
    case DType::s64: return store<int64_t>(p, v);
    case DType::u8: return store<uint8_t>(p, v);
    case DType::u16: return store<uint16_t>(p, v);
    case DType::u32: return store<uint32_t>(p, v);
    case DType::u64: return store<uint64_t>(p, v);
    case DType::f8e4m3fn: return store<uint8_t>(p, encode(kE4M3, v));
    case DType::f8e5m2: return store<uint8_t>(p, encode(kE5M2, v));
    case DType::bf16: {
      // Rounding twice (double → float → bf16) differs from rounding once only for values that float cannot represent.
      uint16_t b = float_to_bf16(static_cast<float>(v));
      std::memcpy(p, &b, 2);
      return;
    }
    case DType::f16: {
      auto b = static_cast<uint16_t>(encode(kF16, v));
      std::memcpy(p, &b, 2);
      return;
    }
    case DType::f32: return store<float>(p, v);
    case DType::f64: return store<double>(p, v);
  }
}

uint16_t float_to_f16(float v) { return static_cast<uint16_t>(F16::narrowed(std::bit_cast<uint32_t>(v))); }
float f16_to_float(uint16_t bits) { return std::bit_cast<float>(F16::widened(bits)); }

void convert_elements(DType from, const void* in, DType to, void* out, size_t n) {
  if (const Convert c = conversion(from, to)) return c(in, out, n);
  const size_t from_size = size_of(from), to_size = size_of(to);
  for (size_t i = 0; i < n; ++i)
    store_element(to, static_cast<std::byte*>(out) + i * to_size,
                  load_element(from, static_cast<const std::byte*>(in) + i * from_size));
}

}  // namespace md
