// Copies of the rows of matrices, from bf16 to f32 and back, in vector code. Thread safe.
#pragma once

#include <cstdint>

namespace md {

/// `rows` rows of `cols` elements, `stride` elements from one to the next, become rows `to_stride` apart.
void widen(const uint16_t* from, int64_t rows, int64_t cols, int64_t stride, float* to, int64_t to_stride);
/// The same to bf16, rounded to the nearest, halfway to even.
void narrow(const float* from, int64_t rows, int64_t cols, int64_t stride, uint16_t* to, int64_t to_stride);

}  // namespace md
