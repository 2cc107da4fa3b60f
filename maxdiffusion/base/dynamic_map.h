// The codebook of 8-bit optimizer states: 256 numbers in seven decades. Each decade has twice as many numbers as the
// one below it; the largest has 64 per sign (128 if the codes are unsigned). Sources: Dettmers 2015, "8-Bit
// Approximations for Parallelism in Deep Learning"; Dettmers et al. 2022, "8-bit Optimizers via Block-wise
// Quantization".
#pragma once

#include <array>
#include <cstdint>

namespace md {

/// Number of consecutive elements, in a layer's row-major order, that share one scale.
inline constexpr int64_t kScaleBlock = 256;

/// A decade: its numbers are the middles of `count` equal parts of [0.1, 1] · size.
struct Decade {
  double size;
  int count;
  constexpr double number(int i) const { return size * (0.1 + 0.9 * (i + 0.5) / count); }
  constexpr double first() const { return number(0); }
  constexpr double last() const { return number(count - 1); }
};
inline constexpr int kDecades = 7;
constexpr Decade decade(int i, bool with_sign) {
  double size = 1;
  for (int k = i; k < kDecades - 1; ++k) size /= 10;
  return {size, with_sign ? 1 << i : 2 << i};
}

/// The 256 numbers that the codes mean, ascending: those of all decades (`with_sign`: positive and negative), 0 and 1.
const std::array<float, 256>& dynamic_map(bool with_sign);

}  // namespace md
