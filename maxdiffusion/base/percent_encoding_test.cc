#include "maxdiffusion/base/percent_encoding.h"

#include <gtest/gtest.h>

namespace md {
namespace {

TEST(PercentEncoding, KeepsWhatAPathMayHoldAndNoOtherByte) {
  EXPECT_EQ(percent_encoded("runs/a-b_c.~0/Z.png"), "runs/a-b_c.~0/Z.png");
  EXPECT_EQ(percent_encoded("a b,c?d#e%f&g\"h'i"), "a%20b%2Cc%3Fd%23e%25f%26g%22h%27i");
  EXPECT_EQ(percent_encoded("ä\n\x7f"), "%C3%A4%0A%7F");
  EXPECT_EQ(percent_encoded(""), "");
}

}  // namespace
}  // namespace md
