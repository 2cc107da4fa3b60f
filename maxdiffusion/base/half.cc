#include "maxdiffusion/base/half.h"

#include <cmath>
#include <cstring>

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

uint16_t float_to_f16(float v) { return static_cast<uint16_t>(encode(kF16, v)); }
float f16_to_float(uint16_t bits) { return static_cast<float>(decode(kF16, bits)); }

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
      // Rounding twice (double → float → bf16) could differ from once only where double has more bits than float.
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

}  // namespace md
