// Codes of moments: what is done for many numbers at a time equals what is done for one.

#include "maxdiffusion/kernels/eight_bit_codes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "maxdiffusion/base/dynamic_map.h"

namespace md {
namespace {

TEST(EightBitCodes, OfManyNumbersAreThoseOfEachAndOfTheNearestNumberOfTheMap) {
  for (const bool with_sign : {true, false}) {
    const auto& map = dynamic_map(with_sign);
    std::vector<uint8_t> codes(256);
    std::iota(codes.begin(), codes.end(), uint8_t{0});
    std::vector<float> numbers(256);
    decode(with_sign, codes.data(), numbers.data(), 256);
    for (size_t i = 0; i < 256; ++i) EXPECT_NEAR(numbers[i], map[i], 1e-6 * std::abs(map[i])) << i;

    std::vector<float> values = {0, 1};
    for (double v = 1e-9; v < 1; v *= 1.001) values.push_back(static_cast<float>(v));
    if (with_sign)
      for (size_t i = values.size(); i-- > 0;) values.push_back(-values[i]);
    const auto n = static_cast<int64_t>(values.size());
    codes.resize(values.size());
    encode(with_sign, values.data(), 1, codes.data(), n);
    for (size_t i = 0; i < values.size(); ++i) {
      uint8_t one = 0;
      encode(with_sign, &values[i], 1, &one, 1);
      EXPECT_EQ(codes[i], one) << values[i];
      const auto far = [&](int code) {
        return code < 0 || code > 255 ? INFINITY : std::abs(map[static_cast<size_t>(code)] - values[i]);
      };
      const float slack = 1e-6f * std::abs(values[i]);
      EXPECT_LE(far(codes[i]), far(codes[i] - 1) + slack) << values[i];
      EXPECT_LE(far(codes[i]), far(codes[i] + 1) + slack) << values[i];
    }
  }
}

}  // namespace
}  // namespace md
