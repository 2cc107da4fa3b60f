// bf16, f16 and the two f8 types as bit patterns, converted through float. Rounding: to nearest, ties to even.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "maxdiffusion/base/dtype.h"

namespace md {

inline uint16_t float_to_bf16(float v) {
  const auto bits = std::bit_cast<uint32_t>(v);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>((v == v ? rounded : bits | 0x400000u) >> 16);
}
inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
uint16_t float_to_f16(float v);
float f16_to_float(uint16_t bits);

/// One element at `data` of type t as double (pred: 0 or 1), and back (integers: truncated towards zero).
double load_element(DType t, const void* data);
void store_element(DType t, void* data, double value);
/// Converts n elements as store_element(load_element) does, bit for bit; only bf16 to f32 differs, which keeps the bits
/// of a NaN. Vectorized between f32 and the small floats.
void convert_elements(DType from, const void* in, DType to, void* out, size_t n);

}  // namespace md
