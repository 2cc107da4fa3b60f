#include "maxdiffusion/base/finite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace md {
namespace {

TEST(Finite, TheFirstInfinityOrNanIsFoundInEveryType) {
  std::vector<float> v(10'000, -3.4e38f);
  const HostArray whole = HostArray::of<float>({DType::f32, {10'000}}, v);
  EXPECT_FALSE(first_not_finite(whole));
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    for (size_t at : {size_t{0}, size_t{4095}, size_t{4096}, size_t{9'999}}) {
      std::vector<float> w(10'000, 1.5f);
      w[at] = w.back() = bad;
      const HostArray a = HostArray::of<float>({DType::f32, {100, 100}}, w);
      for (DType type : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8e5m2})
        EXPECT_EQ(first_not_finite(a.cast(type)), static_cast<int64_t>(at)) << to_string(type) << " " << bad;
    }
  }
}

TEST(Finite, LargeNumbersAreFinite) {
  const std::vector<uint8_t> e4m3 = {0x7e, 0xfe, 0x78};  // ±448, 256
  EXPECT_FALSE(first_not_finite(HostArray::of<uint8_t>({DType::f8e4m3fn, {3}}, e4m3)));
  const std::vector<uint8_t> nan = {0x7e, 0xff};
  EXPECT_EQ(first_not_finite(HostArray::of<uint8_t>({DType::f8e4m3fn, {2}}, nan)), 1);
  EXPECT_FALSE(first_not_finite(HostArray(Shape{DType::f32, {0}})));
  const std::vector<int32_t> whole = {0x7f80'0000, -1};
  EXPECT_FALSE(first_not_finite(HostArray::of<int32_t>({DType::s32, {2}}, whole)));
}

}  // namespace
}  // namespace md
