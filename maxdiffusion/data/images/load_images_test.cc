#include "maxdiffusion/data/images/load_images.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/images/test_images.h"
#include "maxdiffusion/data/records/open_source.h"

namespace md {
namespace {

TEST(LoadImages, OfABucketAreOfItsSizeInStoredOrder) {
  const Mixed mixed;
  ImageConfig config = in_small_buckets();
  config.sizes = true;
  const ImagesInBuckets sorted = sort_into_aspect_buckets(open_source({.train_data_dir = mixed.folder.path()}), config);
  ASSERT_EQ(sorted.sizes.size(), 3u);
  auto bucket = [&](size_t b) { return load_images(*sorted.source, sorted.records[b], config, &sorted.sizes[b]); };
  EXPECT_EQ(bucket(0).pixels.dims(), (Dims{2, 20, 12, 3}));
  EXPECT_EQ(bucket(1).pixels.dims(), (Dims{1, 16, 16, 3}));
  EXPECT_EQ(bucket(2).pixels.dims(), (Dims{4, 12, 20, 3}));
  EXPECT_EQ(bucket(0).captions, (std::vector<std::string>{"1", "5"}));
  EXPECT_EQ(bucket(2).captions, (std::vector<std::string>{"0", "3", "4", "6"}));
  EXPECT_EQ(bucket(2).time_ids.dims(), (Dims{4, 6}));
  EXPECT_EQ(bucket(2).time_ids.view<float>()[7], 41);
  // A record whose size differs from the one in its header.
  std::vector<int64_t> wrong = sorted.records[2];
  wrong.push_back(sorted.records[1][0]);
  const LoadedImages loaded = load_images(*sorted.source, wrong, config, &sorted.sizes[2]);
  EXPECT_EQ(loaded.names.size(), 4u);
  ASSERT_EQ(loaded.skipped.size(), 2u);  // and the one that does not decode
  EXPECT_NE(loaded.skipped[1].find("its header gave a size for the bucket 20x12; it decodes to 16x16"),
            std::string::npos)
      << loaded.skipped[1];
}

TEST(LoadImages, InPartsAreThoseOfTheWhole) {
  const auto source = open_source({.dataset_type = "synthetic", .synthetic_num_samples = 110, .resolution = 8});
  const ImageConfig config{
      .resolution = 8, .random_flip = true, .mask = MaskFrom::alpha, .mask_downscale = 4, .sizes = true};
  const LoadedImages whole = load_images(source, config);
  ASSERT_EQ(whole.pixels.dims(), (Dims{110, 8, 8, 3}));
  for (int64_t at = 0; at < 110; at += 30) {
    const int64_t n = std::min<int64_t>(30, 110 - at);
    std::vector<int64_t> records(static_cast<size_t>(n));
    std::iota(records.begin(), records.end(), at);
    const LoadedImages part = load_images(*source, records, config);
    for (auto field : {&LoadedImages::pixels, &LoadedImages::mask, &LoadedImages::mirrored_mask,
                       &LoadedImages::time_ids, &LoadedImages::mirrored_time_ids}) {
      const HostArray &a = part.*field, &all = whole.*field;
      ASSERT_EQ(a.dims()[0], n);
      ASSERT_EQ(std::memcmp(a.data(), all.data() + at * all.shape().bytes() / 110, a.bytes()), 0);
    }
    EXPECT_TRUE(std::ranges::equal(part.captions,
                                   std::span(whole.captions).subspan(static_cast<size_t>(at), static_cast<size_t>(n))));
  }
}

TEST(LoadImages, MirroredAreThoseThatAFlipMakes) {
  const HostArray rgb = smooth(6, 9);
  const ImageConfig config{.resolution = 5};
  const HostArray flipped = fit_image(rgb, config, {.flip = true}), turned = mirrored(fit_image(rgb, config));
  ASSERT_EQ(turned.shape(), flipped.shape());
  EXPECT_EQ(std::memcmp(turned.data(), flipped.data(), flipped.bytes()), 0);
}

}  // namespace
}  // namespace md
