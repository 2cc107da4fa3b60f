// Copies of the rows of matrices, in their type or from bf16 to f32 and back, in vector code. Thread safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace md {

/// `rows` rows of `cols` elements, `stride` elements from one to the next, become rows `to_stride` apart.
template <class T>
void copy_rows(const T* from, int64_t rows, int64_t cols, int64_t stride, T* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += to_stride) std::copy_n(from, cols, to);
}
/// The same from bf16 to f32.
void widen(const uint16_t* from, int64_t rows, int64_t cols, int64_t stride, float* to, int64_t to_stride);
/// The same from f32 to bf16, rounded to the nearest, halfway to even.
void narrow(const float* from, int64_t rows, int64_t cols, int64_t stride, uint16_t* to, int64_t to_stride);

}  // namespace md
