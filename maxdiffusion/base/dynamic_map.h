// The codebook of 8-bit optimizer states, and of the scales of NF4: 256 numbers in seven decades. Each decade has twice
// as many numbers as the one below it; the largest has 64 per sign (128 if the codes are unsigned). Sources: Dettmers
// 2015, "8-Bit Approximations for Parallelism in Deep Learning"; Dettmers et al. 2022, "8-bit Optimizers via Block-wise
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

/// Ranks of magnitudes among the map's positive numbers, from 1; 0 where 0 is nearer. Numbers of a decade are equally
/// far apart, and farther than those of the decade below: the midpoints between neighbours, where the rank grows by
/// one, lie on a concave curve. The rank of x is ⌊min over lines of slope · x + offset⌋, and the number 1 is nearest
/// above `to_one`.
struct RankLines {
  static constexpr int kCount = 2 * kDecades - 1;
  float slope[kCount], offset[kCount], to_one;
};
constexpr RankLines rank_lines(bool with_sign) {
  RankLines l{};
  // The midpoint below number i of a decade.
  const auto below = [&](int d, int i) {
    const Decade here = decade(d, with_sign);
    const double before = i > 0 ? here.number(i - 1) : d > 0 ? decade(d - 1, with_sign).last() : 0;
    return (before + here.number(i)) / 2;
  };
  int n = 0, rank = 1;
  const auto add = [&](double slope, double x, int y) {
    l.slope[n] = static_cast<float>(slope);
    l.offset[n++] = static_cast<float>(y - slope * x);
  };
  for (int d = 0; d < kDecades; ++d) {
    const int count = decade(d, with_sign).count;
    if (d == 0) {
      add(1 / ((count > 1 ? below(0, 1) : below(1, 0)) - below(0, 0)), below(0, 0), 1);
    } else {  // through the first midpoint, steeper than the line above, less so than the one below
      const double slope_above = 1 / (below(d, 1) - below(d, 0));
      const double slope_below = 1 / (below(d, 0) - below(d - 1, decade(d - 1, with_sign).count - 1));
      add((slope_above + slope_below) / 2, below(d, 0), rank);
      add(count / (0.9 * decade(d, with_sign).size), below(d, 1), rank + 1);
    }
    rank += count;
  }
  l.to_one = static_cast<float>((decade(kDecades - 1, with_sign).last() + 1) / 2);
  return l;
}

/// Scales below it have no inverse: their numbers become 0.
inline constexpr float kLeastScale = 1.2e-38f;
constexpr float inverse_scale(float scale) { return scale > kLeastScale ? 1 / scale : 0; }

/// The 256 numbers that the codes mean, ascending: those of all decades (`with_sign`: positive and negative), 0 and 1.
const std::array<float, 256>& dynamic_map(bool with_sign);

}  // namespace md
