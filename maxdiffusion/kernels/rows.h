// Copies of the rows of matrices, in their type or between bf16 and f32, vectorized. Thread safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace md {

/// Copies `rows` rows of `cols` elements with stride `stride` to rows with stride `to_stride` (in elements).
template <class T>
void copy_rows(const T* from, int64_t rows, int64_t cols, int64_t stride, T* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += to_stride) std::copy_n(from, cols, to);
}
/// Like the above, from bf16 to f32.
void widen(const uint16_t* from, int64_t rows, int64_t cols, int64_t stride, float* to, int64_t to_stride);
/// Like the above, from f32 to bf16, rounded to nearest even.
void narrow(const float* from, int64_t rows, int64_t cols, int64_t stride, uint16_t* to, int64_t to_stride);

}  // namespace md
