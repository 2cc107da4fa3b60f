// bf16, f16 and the two f8 types as bit patterns, converted through float. Rounding: to nearest, ties to even.
#pragma once

#include <cstdint>

#include "maxdiffusion/base/dtype.h"

namespace md {

uint16_t float_to_bf16(float v);
float bf16_to_float(uint16_t bits);
uint16_t float_to_f16(float v);
float f16_to_float(uint16_t bits);

/// One element at `data` of type t as double (pred: 0 or 1), and back (integers: truncated towards zero).
double load_element(DType t, const void* data);
void store_element(DType t, void* data, double value);

}  // namespace md
