#include "maxdiffusion/kernels/eight_bit_codes.h"

#include <bit>
#include <cmath>
#include <limits>

#include "maxdiffusion/base/dynamic_map.h"
#include "maxdiffusion/base/vectorized.h"
#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in g++ 12's header, of values that are undefined by intent
#include <immintrin.h>
#endif

namespace md {
namespace {

constexpr RankLines kWithSign = rank_lines(true), kWithoutSign = rank_lines(false);

/// The rank of a magnitude and a part below 1.
[[gnu::always_inline]] inline float rank_of(const RankLines& l, float a) {
  float rank = a * l.slope[0] + l.offset[0];
#pragma GCC unroll 12
  for (int i = 1; i < RankLines::kCount; ++i) {
    const float next = a * l.slope[i] + l.offset[i];
    rank = next < rank ? next : rank;
  }
  return rank;
}

MD_VECTORIZED void encode_with_sign(const float* __restrict x, float by, uint8_t* __restrict codes, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i] * by, found = rank_of(kWithSign, std::fabs(value));
    const float rank = value > kWithSign.to_one ? 128.0f : (found < 127.0f ? found : 127.0f);
    codes[i] = static_cast<uint8_t>(127 + static_cast<int32_t>(std::copysign(rank, value)));
  }
}

MD_VECTORIZED void encode_without_sign(const float* __restrict x, float by, uint8_t* __restrict codes, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i] * by, found = rank_of(kWithoutSign, value);
    codes[i] = static_cast<uint8_t>(static_cast<int32_t>(value > kWithoutSign.to_one ? 255.0f : found));
  }
}

#if defined(__x86_64__)
// Tables that fit in registers, looked up by exponents of floats: half the time of the loops above, a quarter of a
// lookup in memory.
#define MD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

constexpr int kParts = kDecades + 2;  // 0, the decades and 1

/// A number as a line over q, by the last four bits of q's exponent; q = 2 · rank + 1 with a sign, else rank + 1, so
/// that every decade is the q of one exponent.
struct NumberTable {
  float slope[16], offset[16];
};
constexpr int rank_steps(bool with_sign) { return with_sign ? 2 : 1; }
constexpr uint32_t exponent_of(float x) { return std::bit_cast<uint32_t>(x) >> 23; }
constexpr NumberTable number_table(bool with_sign) {
  NumberTable t{};  // 0
  const auto row = [&](int rank) { return exponent_of(static_cast<float>(rank_steps(with_sign) * rank + 1)) & 15; };
  int rank = 1;
  for (int d = 0; d < kDecades; ++d) {
    const Decade here = decade(d, with_sign);
    const double slope = 0.9 * here.size / here.count / rank_steps(with_sign);
    t.slope[row(rank)] = static_cast<float>(slope);
    t.offset[row(rank)] = static_cast<float>(here.first() - slope * (rank_steps(with_sign) * rank + 1));
    rank += here.count;
  }
  t.offset[row(rank)] = 1;
  return t;
}
constexpr NumberTable kNumbersWithSign = number_table(true), kNumbersWithoutSign = number_table(false);

/// A magnitude's part of the map, by the last five bits of its exponent: the numbers of one exponent are in `part` or,
/// above `end`, in the next one. In a part the rank is a line, up to `last`.
struct RankTable {
  float end[32];
  int32_t part[32];
  float slope[16], offset[16], last[16];
};
constexpr float kLeastMagnitude = 0x1p-31f;
constexpr RankTable rank_table(bool with_sign) {
  RankTable t{};
  double begins[kParts] = {};
  int rank = 1;
  for (int d = 0; d < kDecades; ++d) {
    const Decade here = decade(d, with_sign);
    begins[d + 1] = ((d > 0 ? decade(d - 1, with_sign).last() : 0) + here.first()) / 2;
    const double slope = here.count > 1 ? here.count / (0.9 * here.size) : 0;
    t.slope[d + 1] = static_cast<float>(slope);
    t.offset[d + 1] =
        static_cast<float>(here.count > 1 ? rank + 1 - slope * (here.number(0) + here.number(1)) / 2 : rank);
    t.last[d + 1] = static_cast<float>(rank + here.count - 1);
    rank += here.count;
  }
  begins[kParts - 1] = (decade(kDecades - 1, with_sign).last() + 1) / 2;
  t.offset[kParts - 1] = t.last[kParts - 1] = static_cast<float>(rank);
  float low = kLeastMagnitude;
  for (int i = 0; i < 32; ++i, low *= 2) {
    const uint32_t row = exponent_of(low) & 31;
    t.end[row] = std::numeric_limits<float>::infinity();
    for (int part = 1; part < kParts; ++part) {
      const auto begin = static_cast<float>(begins[part]);
      if (begin < low)
        t.part[row] = part;
      else if (begin < 2 * low)
        t.end[row] = begin;
    }
  }
  return t;
}
constexpr RankTable kRanksWithSign = rank_table(true), kRanksWithoutSign = rank_table(false);

template <bool with_sign>
MD_AVX512 void decode_by_tables(const uint8_t* __restrict codes, float* __restrict numbers, int64_t n) {
  const NumberTable& t = with_sign ? kNumbersWithSign : kNumbersWithoutSign;
  const __m512 slope = _mm512_loadu_ps(t.slope), offset = _mm512_loadu_ps(t.offset);
  const __m512i one = _mm512_set1_epi32(1);
  for (int64_t i = 0; i < n; i += 16) {
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i))), rank = code;
    if constexpr (with_sign) {
      code = _mm512_sub_epi32(code, _mm512_set1_epi32(127));
      rank = _mm512_abs_epi32(code);
      rank = _mm512_add_epi32(rank, rank);
    }
    const __m512 q = _mm512_cvtepi32_ps(_mm512_add_epi32(rank, one));
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(q), 23);
    __m512 number = _mm512_fmadd_ps(q, _mm512_permutexvar_ps(exponent, slope), _mm512_permutexvar_ps(exponent, offset));
    if constexpr (with_sign)
      number = _mm512_or_ps(number, _mm512_and_ps(_mm512_castsi512_ps(code), _mm512_set1_ps(-0.0f)));
    _mm512_storeu_ps(numbers + i, number);
  }
}

template <bool with_sign>
MD_AVX512 void encode_by_tables(const float* __restrict numbers, float by, uint8_t* __restrict codes, int64_t n) {
  const RankTable& t = with_sign ? kRanksWithSign : kRanksWithoutSign;
  const __m512 end0 = _mm512_loadu_ps(t.end), end1 = _mm512_loadu_ps(t.end + 16), slope = _mm512_loadu_ps(t.slope),
               offset = _mm512_loadu_ps(t.offset), last = _mm512_loadu_ps(t.last), factor = _mm512_set1_ps(by);
  const __m512i part0 = _mm512_loadu_si512(t.part), part1 = _mm512_loadu_si512(t.part + 16), one = _mm512_set1_epi32(1),
                zero_code = _mm512_set1_epi32(127);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(numbers + i), factor);
    const __m512 a = _mm512_max_ps(with_sign ? _mm512_abs_ps(value) : value, _mm512_set1_ps(kLeastMagnitude));
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(a), 23);
    const __mmask16 above = _mm512_cmp_ps_mask(a, _mm512_permutex2var_ps(end0, exponent, end1), _CMP_GT_OQ);
    __m512i part = _mm512_permutex2var_epi32(part0, exponent, part1);
    part = _mm512_mask_add_epi32(part, above, part, one);
    const __m512 line = _mm512_fmadd_ps(a, _mm512_permutexvar_ps(part, slope), _mm512_permutexvar_ps(part, offset));
    __m512i code = _mm512_cvttps_epi32(_mm512_min_ps(line, _mm512_permutexvar_ps(part, last)));
    if constexpr (with_sign) {
      const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(value));
      const __m512i rank = _mm512_mask_min_epi32(code, negative, code, zero_code);  // there is no -1
      code = _mm512_mask_sub_epi32(_mm512_add_epi32(rank, zero_code), negative, zero_code, rank);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
  }
}

bool has_tables() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}
#endif

}  // namespace

void decode(bool with_sign, const uint8_t* codes, float* numbers, int64_t n) {
  int64_t i = 0;
#if defined(__x86_64__)
  if (has_tables()) {
    i = n / 16 * 16;
    with_sign ? decode_by_tables<true>(codes, numbers, i) : decode_by_tables<false>(codes, numbers, i);
  }
#endif
  const auto& map = dynamic_map(with_sign);
  for (; i < n; ++i) numbers[i] = map[codes[i]];
}

void encode(bool with_sign, const float* numbers, float by, uint8_t* codes, int64_t n) {
  int64_t i = 0;
#if defined(__x86_64__)
  if (has_tables()) {
    i = n / 16 * 16;
    with_sign ? encode_by_tables<true>(numbers, by, codes, i) : encode_by_tables<false>(numbers, by, codes, i);
  }
#endif
  if (i < n) (with_sign ? encode_with_sign : encode_without_sign)(numbers + i, by, codes + i, n - i);
}

}  // namespace md
#if defined(__x86_64__)
#pragma GCC diagnostic pop
#endif
