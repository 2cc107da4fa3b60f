// Numbers and the codes of base/dynamic_map.h, many at a time.
#pragma once

#include <cstdint>

namespace md {

/// The numbers in [-1, 1] (`with_sign`) or [0, 1] that codes mean, within 1e-6 of each.
void decode(bool with_sign, const uint8_t* codes, float* numbers, int64_t n);
/// The nearest codes of numbers that `by` brings into that range.
void encode(bool with_sign, const float* numbers, float by, uint8_t* codes, int64_t n);

}  // namespace md
