// Compares small floats with their definitions: every bit pattern, every midpoint of two neighbours.
#include "maxdiffusion/base/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace md {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

uint32_t store_bits(DType t, double v) {
  uint16_t bits = 0;
  store_element(t, &bits, v);
  return bits;
}
double load_bits(DType t, uint32_t bits) {
  uint16_t b = static_cast<uint16_t>(bits);
  return load_element(t, &b);
}

class SmallFloat : public testing::TestWithParam<DType> {};

TEST_P(SmallFloat, EveryValueSurvivesLoadAndStore) {
  DType t = GetParam();
  uint32_t patterns = size_of(t) == 1 ? 256 : 65536;
  for (uint32_t bits = 0; bits < patterns; ++bits) {
    double v = load_bits(t, bits);
    if (std::isnan(v)) {
      EXPECT_TRUE(std::isnan(load_bits(t, store_bits(t, v))));
    } else {
      ASSERT_EQ(store_bits(t, v), bits) << v;
    }
  }
}

TEST_P(SmallFloat, MidpointsGoToTheEvenNeighbour) {
  DType t = GetParam();
  uint32_t patterns = size_of(t) == 1 ? 128 : 32768;  // non-negative, ascending
  for (uint32_t bits = 0; bits + 1 < patterns; ++bits) {
    double low = load_bits(t, bits), high = load_bits(t, bits + 1);
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    double middle = (low + high) / 2;
    uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(store_bits(t, middle), even) << middle;
    // The next representable float above or below: bf16 is rounded through float.
    auto hair = [](double v, float to) { return static_cast<double>(std::nextafterf(static_cast<float>(v), to)); };
    ASSERT_EQ(store_bits(t, hair(middle, -1)), bits) << middle;
    ASSERT_EQ(store_bits(t, hair(middle, kInf)), bits + 1) << middle;
    ASSERT_EQ(load_bits(t, store_bits(t, -middle)), -load_bits(t, even));
  }
}

INSTANTIATE_TEST_SUITE_P(All, SmallFloat, testing::Values(DType::bf16, DType::f16, DType::f8e4m3fn, DType::f8e5m2),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(SmallFloats, KnownBits) {
  EXPECT_EQ(float_to_bf16(1.0f), 0x3f80);
  EXPECT_EQ(float_to_bf16(-0.0f), 0x8000);
  EXPECT_EQ(float_to_bf16(kInf), 0x7f80);
  EXPECT_EQ(float_to_bf16(3.4e38f), 0x7f80);  // nearer to 2^128 than to the largest finite value
  EXPECT_EQ(float_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_f16(65519.9f), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_f16(5.9604645e-8f), 0x0001);
  EXPECT_EQ(store_bits(DType::f8e4m3fn, 448), 0x7e);
  EXPECT_EQ(store_bits(DType::f8e4m3fn, 1e9), 0x7f);  // the type has no infinity: NaN
  EXPECT_EQ(store_bits(DType::f8e4m3fn, -kInf), 0xff);
  EXPECT_EQ(store_bits(DType::f8e5m2, 57344), 0x7b);
  EXPECT_EQ(store_bits(DType::f8e5m2, 1e9), 0x7c);
}

TEST(SmallFloats, NanStaysNan) {
  for (uint32_t payload : {0x7f800001u, 0x7fffffffu, 0xffc00000u, 0x7f80ffffu}) {
    float nan = std::bit_cast<float>(payload);
    EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(nan))));
    EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(nan))));
  }
}

#ifdef __FLT16_MAX__  // needs a compiler with _Float16; clang 14, used by ./run lint, has none
TEST(SmallFloats, F16AgreesWithTheCompilersOwn) {
  std::mt19937_64 rng(1);
  for (int i = 0; i < 200000; ++i) {
    float v = std::bit_cast<float>(static_cast<uint32_t>(rng()));
    if (std::isnan(v)) continue;
    _Float16 expected = static_cast<_Float16>(v);
    ASSERT_EQ(float_to_f16(v), std::bit_cast<uint16_t>(expected)) << v;
  }
}
#endif

/// Bytes of test values of a type: every bit pattern for types of up to 16 bits; for f32 each upper half with lower
/// halves around the ties of all types, and random bits.
std::vector<uint8_t> patterns(DType t) {
  std::vector<uint8_t> bytes;
  const auto add = [&](uint32_t bits) {
    const auto* p = reinterpret_cast<const uint8_t*>(&bits);
    bytes.insert(bytes.end(), p, p + size_of(t));
  };
  if (t != DType::f32) {
    for (uint32_t i = 0; i < (size_of(t) == 1 ? 256u : 65536u); ++i) add(i);
    return bytes;
  }
  std::mt19937 rng(2);
  for (uint32_t upper = 0; upper < 65536; ++upper)
    for (uint32_t lower : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      add(upper << 16 | lower);
  for (int i = 0; i < 500001; ++i) add(static_cast<uint32_t>(rng()));
  return bytes;
}

TEST(Elements, ConvertedTogetherHaveTheBitsOfEachByItself) {
  const DType types[] = {DType::f32, DType::bf16, DType::f16, DType::f8e4m3fn, DType::f8e5m2};
  for (DType from : types) {
    const std::vector<uint8_t> in = patterns(from);
    const size_t n = in.size() / size_of(from);
    for (DType to : types) {
      if (to == from) continue;
      std::vector<uint8_t> out(n * size_of(to)), each(out.size());
      convert_elements(from, in.data(), to, out.data(), n);
      for (size_t i = 0; i < n; ++i) {
        const uint8_t* a = &in[i * size_of(from)];
        uint8_t* b = &each[i * size_of(to)];
        store_element(to, b, load_element(from, a));
        if (from == DType::bf16 && to == DType::f32) {
          uint16_t bits;
          std::memcpy(&bits, a, 2);
          const float value = bf16_to_float(bits);
          std::memcpy(b, &value, 4);
        }
        ASSERT_EQ(std::memcmp(b, &out[i * size_of(to)], size_of(to)), 0)
            << to_string(from) << " to " << to_string(to) << ": " << load_element(from, a) << " becomes "
            << load_element(to, &out[i * size_of(to)]) << ", not " << load_element(to, b);
      }
    }
  }
}

TEST(Elements, IntegersAreTruncatedTowardsZero) {
  int32_t i = 0;
  store_element(DType::s32, &i, -2.9);
  EXPECT_EQ(i, -2);
  uint8_t p = 0;
  store_element(DType::pred, &p, 0.5);
  EXPECT_EQ(p, 1);
  EXPECT_EQ(load_element(DType::pred, &p), 1.0);
  int64_t large = int64_t{1} << 52;
  EXPECT_EQ(load_element(DType::s64, &large), std::ldexp(1.0, 52));
}

}  // namespace
}  // namespace md
