#include "maxdiffusion/base/nearest.h"

#include <gtest/gtest.h>

namespace md {
namespace {

TEST(NearestFirst, PutsANearWordFirstAndKeepsTheOrderOfTheOthers) {
  EXPECT_EQ(nearest_first("eulr", {"ddim", "ddpm", "euler"}), "euler, ddim, ddpm");
  EXPECT_EQ(nearest_first("heun", {"ddim", "ddpm", "euler"}), "ddim, ddpm, euler");
}

}  // namespace
}  // namespace md
