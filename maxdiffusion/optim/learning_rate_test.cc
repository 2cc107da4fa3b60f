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
  c.max_train_steps = 19;  // 1.9 warm-up steps
  EXPECT_EQ(learning_rate(c, int64_t{1}), 2.0);
  c.warmup_steps_fraction = 0;
  EXPECT_EQ(learning_rate(c, int64_t{0}), 2.0);
}

TEST(LearningRate, LinearAndCosineEndAtZeroAndStayThere) {
  for (const char* name : {"linear", "cosine"}) {
    const auto c = config(name);
    EXPECT_DOUBLE_EQ(learning_rate(c, int64_t{5}), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate(c, int64_t{10}), 2.0);
    EXPECT_NEAR(learning_rate(c, int64_t{55}), 1.0, 1e-12);  // halfway
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

// Expected values are from transformers' get_wsd_schedule(num_warmup_steps=10, num_decay_steps=30,
// num_training_steps=100, min_lr_ratio=0.1), and from (1 - t) / (1/2 + (1 - t)/2) of Chen et al. 2021, "REX".
TEST(LearningRate, FollowsTransformersAndTheRexPaper) {
  auto c = config("warmup_stable_decay");
  c.lr_decay_steps = 30;
  c.lr_scheduler_min_lr_ratio = 0.1;
  const std::pair<int64_t, double> expected[] = {{0, 0.2},  {5, 1.1},   {10, 2.0},  {70, 2.0},
                                                 {85, 1.1}, {90, 0.65}, {100, 0.2}, {500, 0.2}};
  for (const auto& [step, rate] : expected) EXPECT_NEAR(learning_rate(c, step), rate, 1e-12) << step;
  c.lr_num_cycles = 2;  // half cosine waves: down, and up again
  EXPECT_NEAR(learning_rate(c, int64_t{85}), 0.2, 1e-12);
  EXPECT_NEAR(learning_rate(c, int64_t{99}), 1.980333, 1e-6);
  c = config("rex");
  EXPECT_NEAR(learning_rate(c, int64_t{5}), 1, 1e-12);
  EXPECT_NEAR(learning_rate(c, int64_t{55}), 2 * 0.5 / 0.75, 1e-12);
  EXPECT_NEAR(learning_rate(c, int64_t{100}), 0, 1e-12);
  c.lr_scheduler_min_lr_ratio = 0.25;
  EXPECT_NEAR(learning_rate(c, int64_t{100}), 0.5, 1e-12);
  c = config("cosine");
  c.lr_scheduler_min_lr_ratio = 0.25;
  EXPECT_NEAR(learning_rate(c, int64_t{55}), 2 * 0.625, 1e-12);
}

TEST(LearningRate, StepsAreCountedOrAPartOfTheSchedule) {
  auto c = config("warmup_stable_decay");
  for (double value : {0.2, 20.0}) {
    c.lr_warmup_steps = value;
    c.lr_decay_steps = value;
    EXPECT_DOUBLE_EQ(learning_rate(c, int64_t{10}), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate(c, int64_t{80}), 2.0);
    EXPECT_NEAR(learning_rate(c, int64_t{90}), 1.0, 1e-12);
  }
  c.lr_warmup_steps = 0;
  EXPECT_EQ(learning_rate(c, int64_t{0}), 2.0);
  for (double wrong : {0.0, 101.0}) {
    c.lr_decay_steps = wrong;
    try {
      learning_rate(c, int64_t{0});
      FAIL();
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), ::testing::HasSubstr("lr_decay_steps: "));
    }
  }
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
