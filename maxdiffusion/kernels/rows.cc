#include "maxdiffusion/kernels/rows.h"

#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {

MD_VECTORIZED void widen(const uint16_t* from, int64_t rows, int64_t cols, int64_t stride, float* to,
                         int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += to_stride)
    for (int64_t i = 0; i < cols; ++i) to[i] = load(from[i]);
}

MD_VECTORIZED void narrow(const float* from, int64_t rows, int64_t cols, int64_t stride, uint16_t* to,
                          int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += to_stride)
    for (int64_t i = 0; i < cols; ++i) to[i] = float_to_bf16(from[i]);
}

}  // namespace md
