#include "maxdiffusion/data/images/load_images.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <span>

#include "maxdiffusion/data/images/test_images.h"
#include "maxdiffusion/data/records/open_source.h"

namespace md {
namespace {

TEST(LoadInBuckets, GroupsPicturesBySize) {
  const Mixed mixed;
  ImageConfig config = in_small_buckets();
  config.sizes = true;
  const auto groups = load_in_aspect_buckets(open_source({.train_data_dir = mixed.folder.path()}), config);
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].pixels.dims(), (Dims{2, 20, 12, 3}));
  EXPECT_EQ(groups[1].pixels.dims(), (Dims{1, 16, 16, 3}));
  EXPECT_EQ(groups[2].pixels.dims(), (Dims{4, 12, 20, 3}));
  EXPECT_EQ(groups[0].captions, (std::vector<std::string>{"1", "5"}));
  EXPECT_EQ(groups[2].captions, (std::vector<std::string>{"0", "3", "4", "6"}));
  EXPECT_EQ(groups[0].skipped.size(), 1u);
  EXPECT_EQ(groups[2].time_ids.dims(), (Dims{4, 6}));
  EXPECT_EQ(groups[2].time_ids.view<float>()[7], 41);
  std::set<std::string> prints;
  for (const auto& g : groups) prints.insert(g.fingerprint);
  EXPECT_EQ(prints.size(), 3u);
  // Of one bucket the fingerprint changes with its own pictures alone.
  write_png(mixed.folder / "2.png", smooth(16, 16, 9));
  const auto after = load_in_aspect_buckets(open_source({.train_data_dir = mixed.folder.path()}), config);
  EXPECT_EQ(after[0].fingerprint, groups[0].fingerprint);
  EXPECT_NE(after[1].fingerprint, groups[1].fingerprint);
}

TEST(LoadInBuckets, JoinsPartsInStoredOrder) {
  // More than are read together.
  const auto source = open_source({.dataset_type = "synthetic", .synthetic_num_samples = 1100, .resolution = 8});
  ImageConfig config{.resolution = 8, .mask = MaskFrom::alpha, .mask_downscale = 4, .sizes = true};
  const LoadedImages whole = load_images(source, config);
  ASSERT_EQ(whole.pixels.dims(), (Dims{1100, 8, 8, 3}));
  int64_t at = 0;
  each_group(source, config, 300, [&](LoadedImages&& part) {
    const auto n = static_cast<int64_t>(part.names.size());
    EXPECT_EQ(n, std::min<int64_t>(300, 1100 - at));
    for (auto field :
         {&LoadedImages::pixels, &LoadedImages::mask, &LoadedImages::time_ids, &LoadedImages::mirrored_time_ids}) {
      const HostArray &a = part.*field, &all = whole.*field;
      ASSERT_EQ(a.dims()[0], n);
      ASSERT_EQ(std::memcmp(a.data(), all.data() + at * all.shape().bytes() / 1100, a.bytes()), 0);
    }
    EXPECT_TRUE(std::ranges::equal(part.captions,
                                   std::span(whole.captions).subspan(static_cast<size_t>(at), static_cast<size_t>(n))));
    at += n;
  });
  EXPECT_EQ(at, 1100);
}

}  // namespace
}  // namespace md
