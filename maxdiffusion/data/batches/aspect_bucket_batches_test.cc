#include "maxdiffusion/data/batches/aspect_bucket_batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

struct Seen {
  size_t bucket;
  std::vector<std::pair<int64_t, uint64_t>> samples;  // index, random bits
  bool operator==(const Seen&) const = default;
};
Seen next(AspectBucketOrder& order) {
  Seen s;
  const AspectBucketOrder::Choice t = order.next();
  s.bucket = t.bucket;
  for (const auto& [index, bits] : t.samples) s.samples.emplace_back(index, bits);
  return s;
}
std::vector<Seen> take(AspectBucketOrder& order, int n) {
  std::vector<Seen> out;
  while (n-- > 0) out.push_back(next(order));
  return out;
}

TEST(AspectBucketOrder, EverySampleComesEquallyOftenInFullBatchesOfOneBucket) {
  const std::vector<int64_t> counts = {7, 1, 12, 3};
  AspectBucketOrder order(counts, 4, {.seed = 3});
  EXPECT_EQ(order.size(), 23);
  // A bucket has as many batches in 4 epochs as it has samples.
  std::map<std::pair<size_t, int64_t>, int> times;
  std::vector<size_t> buckets;
  for (const Seen& s : take(order, 23)) {
    EXPECT_EQ(s.samples.size(), 4u);
    buckets.push_back(s.bucket);
    for (const auto& [index, bits] : s.samples) ++times[{s.bucket, index}];
  }
  EXPECT_EQ(order.position().epoch, 3);  // at the end of the fourth
  EXPECT_EQ(times.size(), 23u);
  for (const auto& [sample, n] : times) EXPECT_EQ(n, 4) << sample.first << " " << sample.second;
  EXPECT_FALSE(std::ranges::is_sorted(buckets));  // mixed
  // Within an epoch of its bucket no sample comes twice.
  std::set<int64_t> first;
  AspectBucketOrder again(counts, 4, {.seed = 3});
  for (int batches = 0; batches < 3;) {
    const Seen s = next(again);
    if (s.bucket != 2) continue;
    ++batches;
    for (const auto& [index, bits] : s.samples) first.insert(index);
  }
  EXPECT_EQ(first.size(), 12u);
}

TEST(AspectBucketOrder, FollowsTheSeedAndUnshuffledAsStored) {
  const auto first = [](const StreamConfig& c) {
    AspectBucketOrder order({9, 9}, 3, c);
    return take(order, 6);
  };
  EXPECT_EQ(first({.seed = 1}), first({.seed = 1}));
  EXPECT_NE(first({.seed = 1}), first({.seed = 2}));
  std::vector<int64_t> indices;
  std::vector<size_t> buckets;
  for (const Seen& s : first({.shuffle = false})) {
    buckets.push_back(s.bucket);
    for (const auto& [index, bits] : s.samples) indices.push_back(index);
  }
  EXPECT_EQ(buckets, (std::vector<size_t>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(indices, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(AspectBucketOrder, SeekContinuesAsIfNeverInterruptedForAnyCut) {
  const std::vector<int64_t> counts = {5, 2, 11};
  for (int64_t batch : {1, 3, 8}) {
    AspectBucketOrder whole(counts, batch, {.seed = 5});
    std::vector<Position> cuts;
    std::vector<Seen> expected;
    for (int i = 0; i < 30; ++i) {
      cuts.push_back(whole.position());
      expected.push_back(next(whole));
    }
    for (size_t cut = 0; cut < 30; ++cut) {
      AspectBucketOrder order(counts, batch, {.seed = 5});
      take(order, 4);  // from any position
      order.seek(cuts[cut]);
      EXPECT_EQ(order.position(), cuts[cut]);
      for (size_t i = cut; i < 30; ++i) ASSERT_EQ(next(order), expected[i]) << batch << " " << cut << " " << i;
    }
  }
}

TEST(AspectBucketOrder, ProcessesTakeOneBucketTogetherAndShareItsBatch) {
  const std::vector<int64_t> counts = {5, 2, 11};
  AspectBucketOrder one(counts, 6, {.seed = 5});
  AspectBucketOrder a(counts, 6, {.seed = 5, .share = {0, 2, {}}}), b(counts, 6, {.seed = 5, .share = {1, 2, {}}});
  for (int i = 0; i < 20; ++i) {
    const Seen whole = next(one), x = next(a), y = next(b);
    EXPECT_EQ(a.position(), one.position());
    EXPECT_EQ(b.position(), one.position());
    ASSERT_EQ(x.bucket, whole.bucket);
    ASSERT_EQ(y.bucket, whole.bucket);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(x.samples[k], whole.samples[k]);
      EXPECT_EQ(y.samples[k], whole.samples[3 + k]);
    }
  }
}

TEST(AspectBucketOrder, PositionsThatTheDataLacksContinueWithTheNextEpoch) {
  AspectBucketOrder order({6, 6}, 3, {.seed = 5});
  for (const Position& p :
       {Position{.epoch = 4, .index = 2}, Position{.epoch = 4, .index = 15}, Position{4, 3, 0, 0, 3}}) {
    EXPECT_FALSE(order.seek(p)) << p.index;
    EXPECT_EQ(order.position(), (Position{.epoch = 5})) << p.index;
  }
  EXPECT_TRUE(order.seek({.epoch = 4, .index = 3}));
  EXPECT_EQ(order.position(), (Position{.epoch = 4, .index = 3}));
  EXPECT_THROW(order.seek({.epoch = -1}), Error);
}

TEST(InBuckets, BatchesAreRowsOfOneBucketsArrays) {
  const auto bucket = [](int64_t n, int64_t width, float first) {
    HostArray a(Shape{DType::f32, {n, width}});
    auto v = a.mutable_view<float>();
    for (size_t i = 0; i < v.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / width;
      v[i] = first + static_cast<float>(row);
    }
    return Batch{{"x", a}};
  };
  auto data = in_aspect_buckets({bucket(4, 2, 0), bucket(6, 3, 100)}, 2, {.seed = 1});
  EXPECT_EQ(data->size(), 10);
  std::multiset<float> seen;
  for (int i = 0; i < 5; ++i) {
    const HostArray x = data->next().at("x");
    const int64_t width = x.dims()[1];
    EXPECT_EQ(x.dims()[0], 2);
    for (int64_t r = 0; r < 2; ++r) {
      const float value = x.view<float>()[static_cast<size_t>(r * width)];
      EXPECT_EQ(width, value < 100 ? 2 : 3);
      EXPECT_EQ(x.view<float>()[static_cast<size_t>(r * width + width - 1)], value);
      seen.insert(value);
    }
  }
  EXPECT_EQ(seen, (std::multiset<float>{0, 1, 2, 3, 100, 101, 102, 103, 104, 105}));
}

TEST(LogAspectBuckets, NamesImagesNextToClipsAsOfOneFrame) {
  const auto log_of = [](const std::vector<ImageSize>& sizes) {
    testing::internal::CaptureStderr();
    log_aspect_buckets(sizes, {2, 3}, 2);
    return testing::internal::GetCapturedStderr();
  };
  const std::string mixed = log_of({{32, 48}, {32, 48, 9}}), images = log_of({{32, 48}, {48, 32}});
  EXPECT_NE(mixed.find("bucket 48x32x1: 2 images\n"), std::string::npos) << mixed;
  EXPECT_NE(mixed.find("bucket 48x32x9: 3 clips\n"), std::string::npos) << mixed;
  EXPECT_NE(images.find("bucket 48x32: 2 images\n"), std::string::npos) << images;
}

}  // namespace
}  // namespace md
