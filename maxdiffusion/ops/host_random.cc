// The generator on the host. Compiled so that every processor rounds in the same way (no contraction of products and
// sums).
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/kernels/vector_math.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/ops/threefry.h"

namespace md {
namespace {

template <int kGroup>
[[gnu::always_inline]] inline void four_rounds(const uint32_t (&key)[3], uint32_t& x0, uint32_t& x1) {
  auto round = [&](int r) __attribute__((always_inline)) {
    x0 += x1;
    x1 = (x1 << r | x1 >> (32 - r)) ^ x0;
  };
  constexpr auto& kRotation = kThreefryRotation[kGroup % 2];
  round(kRotation[0]), round(kRotation[1]), round(kRotation[2]), round(kRotation[3]);
  x0 += key[(kGroup + 1) % 3];
  x1 += key[(kGroup + 2) % 3] + kGroup + 1;
}

[[gnu::always_inline]] inline void threefry_block(const ThreefryWords& k, uint32_t& x0, uint32_t& x1) {
  const uint32_t key[3] = {k[0], k[1], k[0] ^ k[1] ^ kThreefryParity};
  x0 += key[0];
  x1 += key[1];
  four_rounds<0>(key, x0, x1), four_rounds<1>(key, x0, x1), four_rounds<2>(key, x0, x1);
  four_rounds<3>(key, x0, x1), four_rounds<4>(key, x0, x1);
}

/// Element `index` of an array.
[[gnu::always_inline]] inline uint32_t element(const ThreefryWords& key, uint64_t index) {
  uint32_t x0 = static_cast<uint32_t>(index >> 32), x1 = static_cast<uint32_t>(index);
  threefry_block(key, x0, x1);
  return x0;
}

/// The midpoint of one of 2²⁴ intervals of (−1, 1), selected by 24 bits: exact, never ±1.
[[gnu::always_inline]] inline float symmetric(uint32_t bits) {
  return static_cast<float>(static_cast<int32_t>(bits >> 8) * 2 + 1 - (1 << 24)) * static_cast<float>(kUnit);
}

/// Coefficients from the highest power down.
template <class... Rest>
[[gnu::always_inline]] inline float horner(float x, float highest, Rest... rest) {
  float p = highest;
  ((p = p * x + rest), ...);
  return p;
}

/// √2·erf⁻¹(u) for |u| < 1, to 4e-7 relative. Source: Giles 2012, "Approximating the erfinv function", single
/// precision.
[[gnu::always_inline]] inline float normal_quantile(float u) {
  const float w = -vector_log((1 - u) * (1 + u));
  const float c = w - 2.5f, t = std::sqrt(w) - 3;
  const float centre = horner(c, 2.81022636e-08f, 3.43273939e-07f, -3.5233877e-06f, -4.39150654e-06f, 0.00021858087f,
                              -0.00125372503f, -0.00417768164f, 0.246640727f, 1.50140941f);
  const float tail = horner(t, -0.000200214257f, 0.000100950558f, 0.00134934322f, -0.00367342844f, 0.00573950773f,
                            -0.0076224613f, 0.00943887047f, 1.00167406f, 2.83297682f);
  return (w < 5 ? centre : tail) * u * 1.41421356f;
}

/// Elements from `from` on, of a normal with standard deviation `scale`; with `mass` < 1, of its central part with that
/// probability.
MD_VECTORIZED void fill_normal(ThreefryWords key, uint64_t from, float mass, float scale, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = normal_quantile(mass * symmetric(element(key, from + i))) * scale;
}

MD_VECTORIZED void fill_uniform(ThreefryWords key, uint64_t from, float scale, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i)
    out[i] = scale * static_cast<float>(static_cast<int32_t>(element(key, from + i) >> 8) * 2 - (1 << 24)) *
             static_cast<float>(kUnit);
}

constexpr float kMassWithinTwo = 0.95449973610364158f;  // of a unit normal: erf(√2)

}  // namespace

std::array<uint32_t, 2> threefry(std::array<uint32_t, 2> key, std::array<uint32_t, 2> x) {
  threefry_block(key, x[0], x[1]);
  return x;
}

HostArray key_of_seed(uint64_t seed) {
  const uint32_t words[] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  return HostArray::of<uint32_t>({DType::u32, {2}}, words);
}

HostRng::HostRng(uint64_t seed, std::string_view purpose)
    : key_(threefry(seed_key(seed), {kPurpose, purpose_word(purpose)})) {}

uint32_t HostRng::bits(uint64_t index) const { return element(key_, index); }
double HostRng::uniform(uint64_t index) const { return (bits(index) >> 8) * kUnit; }

void HostRng::fill(Distribution d, double scale, uint64_t from, std::span<float> out) const {
  const auto s = static_cast<float>(scale);
  switch (d) {
    case Distribution::normal: return fill_normal(key_, from, 1, s, out.data(), out.size());
    case Distribution::truncated_normal: return fill_normal(key_, from, kMassWithinTwo, s, out.data(), out.size());
    case Distribution::symmetric_uniform: return fill_uniform(key_, from, s, out.data(), out.size());
  }
}

uint64_t HostRng::below(uint64_t index, uint64_t bound) const {
  check(bound >= 1 && bound <= uint64_t{1} << 32, Code::internal, "HostRng::below: bound {}", bound);
  return bits(index) * bound >> 32;
}

}  // namespace md
