#include "maxdiffusion/kernels/vector_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace md {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The largest relative error over [−126, 127], where results are normal numbers.
double error(float (*f)(float)) {
  double worst = 0;
  for (float x = -126; x < 127; x += 0.0173f)
    worst = std::max(worst, std::abs(static_cast<double>(f(x)) / std::exp2(static_cast<double>(x)) - 1));
  return worst;
}

TEST(PowersOfTwo, HaveTheDocumentedErrors) {
  EXPECT_LT(error([](float x) { return vector_exp2<float>(x); }), std::ldexp(1.0, -23));
  const double coarse = error([](float x) { return vector_exp2<uint16_t>(x); });
  EXPECT_LT(coarse, std::ldexp(1.0, -13));
  EXPECT_GT(coarse, std::ldexp(1.0, -15));  // has a shorter polynomial than the f32 one
}

TEST(PowersOfTwo, AreZeroForMaskedLogitsAndKeepNan) {
  for (const float x : {-126.6f, -127.0f, -1000.0f, -kInfinity}) {
    EXPECT_EQ(vector_exp2<float>(x), 0) << x;
    EXPECT_EQ(vector_exp2<uint16_t>(x), 0) << x;
  }
  for (const float nan : {std::nanf(""), -std::nanf("1")}) {
    EXPECT_TRUE(std::isnan(vector_exp2<float>(nan)));
    EXPECT_TRUE(std::isnan(vector_exp2<uint16_t>(nan)));
  }
  EXPECT_EQ(vector_exp2<float>(0), 1);
}

}  // namespace
}  // namespace md
