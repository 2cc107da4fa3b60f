// Loops over floats that the compiler turns into vector code for the processor they run on.
#pragma once

#include <bit>
#include <cstdint>
#include <numbers>
#include <type_traits>

#include "maxdiffusion/base/vectorized.h"

namespace md {

constexpr float kLog2E = std::numbers::log2e_v<float>;

/// exp(x) within 2 units in the last place; 0 below −87, infinity above 88, NaN of NaN. Without branches.
/// Source: Cody and Waite's reduction, Cephes' expf polynomial.
[[gnu::always_inline]] inline float vector_exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5·2²³: adding it leaves an integer in the low bits
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  // 2ⁿ from the bits of kRound + n. A product, so that NaN stays NaN.
  const float power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) - 0x4b400000u + 127u) << 23);
  const float y = (p * r * r + r + 1.0f) * power;
  return x < -87.0f ? 0.0f : (x > 88.0f ? __builtin_inff() : y);
}

/// 2ˣ for x ≤ 127 with a relative error of 2⁻²³, or 2⁻¹³ if the result is rounded to `To` = uint16_t (bf16); 0 below
/// −126.5, NaN of NaN. Without branches. The polynomials of 2ʳ, |r| ≤ ½, minimize the largest relative error.
template <class To>
[[gnu::always_inline]] inline float vector_exp2(float x) {
  constexpr float kRound = 12582912.0f;  // as above
  x = x < -127.0f ? -127.0f : x;         // result 0; NaN stays
  const float shifted = x + kRound, r = x - (shifted - kRound);
  float p;
  if constexpr (std::is_same_v<To, uint16_t>) {
    p = 5.5171669541e-2f;
    p = p * r + 2.4261112544e-1f;
    p = p * r + 6.9326098565e-1f;
    p = p * r + 9.9992807335e-1f;
  } else {
    p = 1.5353361908e-4f;
    p = p * r + 1.3398874414e-3f;
    p = p * r + 9.6184373577e-3f;
    p = p * r + 5.5503324711e-2f;
    p = p * r + 2.4022647914e-1f;
    p = p * r + 6.9314720286e-1f;
    p = p * r + 1.0f;
  }
  return p * std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) - 0x4b400000u + 127u) << 23);
}

/// log(x) for positive finite normal x within 2 units in the last place. Without branches. Source: Cephes' logf.
[[gnu::always_inline]] inline float vector_log(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sqrt_half = 0x3f3504f3u;
  const uint32_t shifted = bits - sqrt_half;  // its exponent is 0 for x in [√½, √2)
  const float e = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float z = std::bit_cast<float>((shifted & 0x007fffffu) + sqrt_half) - 1.0f;
  float p = 7.0376836292e-2f;
  p = p * z - 1.1514610310e-1f;
  p = p * z + 1.1676998740e-1f;
  p = p * z - 1.2420140846e-1f;
  p = p * z + 1.4249322787e-1f;
  p = p * z - 1.6668057665e-1f;
  p = p * z + 2.0000714765e-1f;
  p = p * z - 2.4999993993e-1f;
  p = p * z + 3.3333331174e-1f;
  return (p * z * z * z - e * 2.12194440e-4f - 0.5f * z * z + z) + e * 0.693359375f;
}

/// 1 / (1 + exp(−x)).
[[gnu::always_inline]] inline float vector_sigmoid(float x) { return 1.0f / (1.0f + vector_exp(-x)); }

}  // namespace md
