#include "maxdiffusion/data/images/inspect_images.h"

#include <gtest/gtest.h>

#include "maxdiffusion/data/images/test_images.h"
#include "maxdiffusion/media/resize.h"

namespace md {
namespace {

Record of(const HostArray& rgb, const std::string& name) { return {.name = name, .image = Blob::of(encode_png(rgb))}; }

TEST(InspectedImages, SayWhatIsDamagedSmallAndDuplicate) {
  const ImageConfig config{.resolution = 64};
  const HostArray rgb = smooth(60, 90);
  Record damaged = of(rgb, "damaged");
  damaged.image.bytes = damaged.image.bytes.substr(0, damaged.image.bytes.size() / 2);
  const std::vector<ImageFindings> all = {
      inspect_image(of(rgb, "it"), config), inspect_image(of(resize_rgb8(rgb, 30, 45), "smaller"), config),
      inspect_image(of(flip_rgb8(rgb), "mirrored"), config), inspect_image(damaged, config),
      inspect_image(of(smooth(16, 16, 9), "other"), config)};
  EXPECT_EQ(duplicate_images(all), (std::vector<std::pair<size_t, size_t>>{{0, 1}}));
  EXPECT_TRUE(all[0].fault.empty());
  EXPECT_NE(all[3].fault.find("damaged"), std::string::npos);
  EXPECT_EQ(all[0].size, (ImageSize{60, 90}));
  EXPECT_NEAR(all[0].enlarged, 64.0 / 60, 1e-9);
  EXPECT_EQ(all[4].enlarged, 4);
}

TEST(BucketChart, HasABarOfEachBucketsLength) {
  const HostArray chart = bucket_chart({{64, 64}, {64, 128}}, {10, 5});
  const auto v = chart.view<uint8_t>();
  std::vector<int64_t> lengths;
  for (int64_t row : {1, 2}) {
    int64_t n = 0;
    for (int64_t x = 0; x < chart.dims()[1]; ++x) {
      const auto at = static_cast<size_t>(((row * 20 + 15) * chart.dims()[1] + x) * 3);
      n += v[at] == 70 && v[at + 1] == 110 && v[at + 2] == 180;
    }
    lengths.push_back(n);
  }
  EXPECT_EQ(lengths, (std::vector<int64_t>{420, 210}));
}

TEST(SeenByModel, IsTheCutImageWithItsMaskInRed) {
  HostArray rgb(Shape{DType::u8, {32, 64, 3}}), mask(Shape{DType::u8, {32, 64, 3}});
  std::ranges::fill(rgb.mutable_view<uint8_t>(), 200);
  for (size_t i = 0; i < size_t{32} * 64 * 3; ++i) mask.mutable_view<uint8_t>()[i] = i / 3 % 64 < 32 ? 0 : 255;
  Record r = of(rgb, "it");
  r.mask = Blob::of(encode_png(mask));
  const ImageConfig config{.resolution = 64, .buckets = AspectBuckets::of({{32, 64}}), .mask = MaskFrom::record};
  const HostArray seen = seen_by_model(r, config, 0, 64);
  const auto at = [&](int64_t y, int64_t x) {
    const auto i = static_cast<size_t>((y * 64 + x) * 3);
    return std::array<int, 3>{seen.view<uint8_t>()[i], seen.view<uint8_t>()[i + 1], seen.view<uint8_t>()[i + 2]};
  };
  EXPECT_EQ(at(4, 10), (std::array<int, 3>{230, 230, 230}));  // above the image
  EXPECT_EQ(at(32, 8), (std::array<int, 3>{200, 60, 60}));
  EXPECT_EQ(at(32, 56), (std::array<int, 3>{200, 200, 200}));
}

}  // namespace
}  // namespace md
