#include "maxdiffusion/base/nearest.h"

#include <gtest/gtest.h>

namespace md {
namespace {

TEST(NearestFirst, PutsANearWordFirstAndKeepsTheOrderOfTheOthers) {
  EXPECT_EQ(nearest_first("eulr", {"ddim", "ddpm", "euler"}), "euler, ddim, ddpm");
  EXPECT_EQ(nearest_first("heun", {"ddim", "ddpm", "euler"}), "ddim, ddpm, euler");
}

TEST(Nearest, IsFoundAtOnceForWordsOfAnyLength) {
  const std::vector<std::string> known(1000, "learning_rate");
  EXPECT_EQ(nearest("lerning_rate", known), "learning_rate");
  EXPECT_EQ(nearest("learn", known), "");
  EXPECT_EQ(nearest(std::string(1'000'000, 'a'), known), "");  // a table of 10¹⁰ distances would take minutes
}

}  // namespace
}  // namespace md
