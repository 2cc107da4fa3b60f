#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {
namespace {

OptimConfig config(const char* scheduler) {
  OptimConfig c;
  c.learning_rate = 2.0;
  c.max_train_steps = 100;
  c.warmup_steps_fraction = 0.1;
  c.lr_scheduler = scheduler;
  return c;
}

TEST(LearningRate, ConstantNeverWarmsUp) {
  const auto c = config("constant");
  for (int64_t k : {0, 5, 99, 1000}) EXPECT_EQ(learning_rate(c, k), 2.0);
}

// S2-30, S4-30
TEST(LearningRate, WarmUpIsLinearFromZeroAndThenConstant) {
  const auto c = config("constant_with_warmup");
  EXPECT_EQ(learning_rate(c, int64_t{0}), 0.0);
  EXPECT_DOUBLE_EQ(learning_rate(c, int64_t{3}), 2.0 * 3 / 10);
  EXPECT_EQ(learning_rate(c, int64_t{10}), 2.0);
  EXPECT_EQ(learning_rate(c, int64_t{5000}), 2.0);
}

TEST(LearningRate, WarmUpLengthIsRoundedDown) {
  auto c = config("constant_with_warmup");
  c.max_train_steps = 19;  // 1.9 updates of warm-up
  EXPECT_EQ(learning_rate(c, int64_t{1}), 2.0);
  c.warmup_steps_fraction = 0;
  EXPECT_EQ(learning_rate(c, int64_t{0}), 2.0);
}

TEST(LearningRate, LinearAndCosineEndAtZeroAndStayThere) {
  for (const char* name : {"linear", "cosine"}) {
    const auto c = config(name);
    EXPECT_DOUBLE_EQ(learning_rate(c, int64_t{5}), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate(c, int64_t{10}), 2.0);
    EXPECT_NEAR(learning_rate(c, int64_t{55}), 1.0, 1e-12);  // half way
    EXPECT_NEAR(learning_rate(c, int64_t{100}), 0.0, 1e-12);
    EXPECT_NEAR(learning_rate(c, int64_t{1000}), 0.0, 1e-12);
  }
  EXPECT_GT(learning_rate(config("cosine"), int64_t{30}), learning_rate(config("linear"), int64_t{30}));
}

TEST(LearningRate, ScheduleMayBeLongerThanTheRun) {
  auto c = config("linear");
  c.learning_rate_schedule_steps = 200;
  EXPECT_DOUBLE_EQ(learning_rate(c, int64_t{110}), 1.0);
}

TEST(LearningRate, UnknownNamesAreRefused) {
  try {
    learning_rate(config("exponential"), int64_t{0});
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(),
                ::testing::HasSubstr("lr_scheduler is 'exponential'; expected one of: constant, constant_with_"));
  }
}

}  // namespace
}  // namespace md
