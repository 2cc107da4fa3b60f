#include "maxdiffusion/storage/tfrecord.h"

#include <gtest/gtest.h>

namespace md {
namespace {

TEST(Tfrecord, ChecksumIsCastagnolis) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(Tfrecord, FrameHoldsLengthChecksumsAndBytes) {
  std::string file;
  append_tfrecord(file, "hello");
  append_tfrecord(file, "");
  ASSERT_EQ(file.size(), 2 * (kTfrecordHead + kTfrecordFoot) + 5);
  EXPECT_EQ(file.substr(0, 8), std::string("\5\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(file.substr(kTfrecordHead, 5), "hello");
  EXPECT_EQ(masked_crc32c(""), 0xa282ead8u);
  EXPECT_EQ(file.substr(file.size() - 4), std::string("\xd8\xea\x82\xa2", 4));
}

}  // namespace
}  // namespace md
