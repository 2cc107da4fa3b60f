// Several processes read the batches that one process would: each its rows, all with the same position.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/batches/image_batches.h"

namespace md {
namespace {

using Make = std::function<std::unique_ptr<Dataset>(const BatchShare&)>;

/// One process; two and four with contiguous rows; two and four whose devices form a torus.
const std::vector<std::vector<BatchShare>> kShares = {
    {{}},
    {{0, 2, {}}, {1, 2, {}}},
    {{0, 4, {}}, {1, 4, {}}, {2, 4, {}}, {3, 4, {}}},
    {{0, 2, {0, 2}}, {1, 2, {1, 3}}},
    {{0, 4, {0, 1, 4, 5}}, {1, 4, {2, 3, 6, 7}}, {2, 4, {8, 9, 12, 13}}, {3, 4, {10, 11, 14, 15}}}};

/// The rows of several processes together are the batch of one process, also after a restart at any position.
void expect_common_batches(const Make& make, int64_t batch, int batches) {
  for (const std::vector<BatchShare>& shares : kShares) {
    auto one = make({});
    std::vector<std::unique_ptr<Dataset>> several;
    for (const BatchShare& s : shares) several.push_back(make(s));
    for (int i = 0; i < batches; ++i) {
      const Position before = one->position();
      const Batch whole = one->next();
      for (size_t p = 0; p < shares.size(); ++p) {
        if (i % 3 == 1) {  // as after a restart
          several[p] = make(shares[p]);
          several[p]->seek(before);
        }
        const Batch mine = several[p]->next();
        EXPECT_EQ(several[p]->position(), one->position());
        ASSERT_EQ(mine.size(), whole.size());
        for (const auto& [name, a] : mine) {
          ASSERT_EQ(whole.at(name).dims()[0], batch);
          ASSERT_EQ(a.dims()[0] * static_cast<int64_t>(shares.size()), batch);
          const size_t row = a.bytes() / static_cast<size_t>(a.dims()[0]);
          const std::vector<int64_t> rows = shares[p].rows(batch);
          for (size_t r = 0; r < rows.size(); ++r)
            ASSERT_EQ(0,
                      std::memcmp(a.data() + r * row, whole.at(name).data() + static_cast<size_t>(rows[r]) * row, row))
                << name << " of process " << p << " of " << shares.size() << ", batch " << i;
        }
      }
    }
  }
}

HostArray counting(Dims dims) {
  HostArray a(Shape{DType::s32, std::move(dims)});
  auto v = a.mutable_view<int32_t>();
  std::iota(v.begin(), v.end(), 0);
  return a;
}

/// Images 8 or 24 wide and 8 high, filled with one grey that is the image's number; `bad` ones do not decode.
class Greys : public RecordSource {
 public:
  explicit Greys(int64_t n, std::vector<int64_t> bad = {}) : RecordSource("greys", ""), n_(n), bad_(std::move(bad)) {}
  int64_t size() const override { return n_; }
  Record read(int64_t i) const override {
    Record r{.name = fmt::format("grey {}", i), .caption = std::to_string(i)};
    if (std::ranges::find(bad_, i) != bad_.end()) {
      r.fault = r.name + ": not an image";
      return r;
    }
    r.pixels = HostArray(Shape{DType::u8, {8, i % 3 ? 24 : 8, 3}});
    std::ranges::fill(r.pixels.mutable_view<uint8_t>(), static_cast<uint8_t>(i));
    r.arrays["number"] = HostArray::of<int32_t>({DType::s32, {1}}, std::vector{static_cast<int32_t>(i)});
    return r;
  }

 private:
  int64_t n_;
  std::vector<int64_t> bad_;
};

TEST(BatchShares, OfArraysInMemoryMakeUpTheBatchOfOneProcess) {
  for (bool shuffle : {true, false})
    expect_common_batches(
        [&](const BatchShare& s) {
          return in_memory({{"x", counting({21, 2})}, {"y", counting({21})}}, 16, 3, shuffle, s);
        },
        16, 9);
}

TEST(BatchShares, OfArraysInBucketsMakeUpTheBatchOfOneProcess) {
  expect_common_batches(
      [&](const BatchShare& s) {
        return in_aspect_buckets({{{"x", counting({30, 2})}}, {{"x", counting({17, 3})}}}, 16, {.seed = 3, .share = s});
      },
      16, 9);
}

TEST(BatchShares, OfRecordsByNumberMakeUpTheBatchOfOneProcess) {
  const auto source = std::make_shared<Greys>(21);
  const ImageConfig images{.resolution = 8, .random_crop = true, .random_flip = true};
  expect_common_batches(
      [&](const BatchShare& s) {
        return image_batches(source, images, {.stream = {.seed = 3, .share = s}, .batch = 16, .workers = 2}, nullptr);
      },
      16, 9);
  expect_common_batches(
      [&](const BatchShare& s) { return array_batches(source, {.stream = {.seed = 3, .share = s}, .batch = 16}); }, 16,
      9);
}

TEST(BatchShares, OfImagesInBucketsMakeUpTheBatchOfOneProcess) {
  ImageConfig images{.resolution = 8, .random_flip = true};
  images.buckets.emplace(AspectBucketConfig{8, 4, 16, 4, false});
  const ImagesInBuckets sorted = sort_into_aspect_buckets(std::make_shared<Greys>(40, std::vector<int64_t>{4}), images);
  EXPECT_EQ(sorted.sizes.size(), 2u);
  expect_common_batches(
      [&](const BatchShare& s) {
        return image_batches(sorted, images, {.stream = {.seed = 3, .share = s}, .batch = 16, .workers = 2}, nullptr);
      },
      16, 9);
}

TEST(BatchShares, OfRecordsThatDoNotDecodeAreFullAndKeepTheirPosition) {
  set_log_level(LogLevel::error);
  const auto source = std::make_shared<Greys>(21, std::vector<int64_t>{2, 3, 11});
  const auto good = std::make_shared<Greys>(21);
  const auto make = [](const std::shared_ptr<Greys>& from, const BatchShare& s) {
    return image_batches(from, {.resolution = 8}, {.stream = {.seed = 3, .share = s}, .batch = 8}, nullptr);
  };
  for (int64_t p : {0, 1}) {
    auto all_good = make(good, {p, 2, {}}), d = make(source, {p, 2, {}});
    int replaced = 0;
    for (int i = 0; i < 21; ++i) {
      const HostArray expected = all_good->next().at("pixels"), got = d->next().at("pixels");
      EXPECT_EQ(d->position(), all_good->position());
      ASSERT_EQ(got.shape(), expected.shape());
      for (size_t r = 0; r < 4; ++r) {
        const size_t at = r * got.bytes() / 4;
        const auto want = expected.view<uint8_t>()[at], have = got.view<uint8_t>()[at];
        EXPECT_TRUE(have != 2 && have != 3 && have != 11);
        replaced += have != want;
        EXPECT_EQ(have != want, want == 2 || want == 3 || want == 11);
      }
    }
    EXPECT_GT(replaced, 0);
  }
  const auto none = std::make_shared<Greys>(3, std::vector<int64_t>{0, 1, 2});
  EXPECT_THROW(make(none, {1, 2, {}})->next(), Error);
  set_log_level(LogLevel::info);
}

TEST(BatchShares, OfBatchesThatDoNotDivideAreRefused) {
  EXPECT_THROW(in_memory({{"x", counting({5})}}, 3, 0, true, {0, 2, {}}), Error);
  EXPECT_THROW(in_aspect_buckets({{{"x", counting({5})}}}, 3, {.share = {0, 2, {}}}), Error);
  EXPECT_THROW(array_batches(std::make_shared<Greys>(5), {.stream = {.share = {0, 2, {}}}, .batch = 3})->next(), Error);
}

}  // namespace
}  // namespace md
