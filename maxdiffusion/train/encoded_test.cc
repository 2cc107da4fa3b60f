#include "maxdiffusion/train/encoded.h"

#include <gtest/gtest.h>

namespace md {
namespace {

TEST(WithMirrored, HasEachPictureOnceAsItIsAndThenOnceMirrored) {
  // Two pictures of 1 × 2 pixels with two channels, of bytes and of floats (masks).
  const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 8};
  const HostArray pixels = HostArray::of<uint8_t>({DType::u8, {2, 1, 2, 2}}, bytes);
  const std::vector<double> all = {1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 1, 2, 7, 8, 5, 6};
  EXPECT_EQ(with_mirrored(pixels, 0, 4).to_doubles(), all);
  EXPECT_EQ(with_mirrored(pixels.cast(DType::f32), 0, 4).to_doubles(), all);
  EXPECT_EQ(with_mirrored(pixels, 1, 3).to_doubles(), std::vector<double>(all.begin() + 4, all.begin() + 12));
}

}  // namespace
}  // namespace md
