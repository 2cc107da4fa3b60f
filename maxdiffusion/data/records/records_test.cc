#include "maxdiffusion/data/records/records.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {
namespace {

Record numbered(int64_t i) { return {.name = fmt::format("record {}", i), .caption = std::to_string(i)}; }

/// Records 0 … n−1 by number, or in shards of these sizes.
class Numbers : public RecordSource {
 public:
  explicit Numbers(int64_t n) : RecordSource("numbers", ""), n_(n) {}
  explicit Numbers(std::vector<int64_t> shards) : RecordSource("numbers in shards", ""), shards_(std::move(shards)) {}
  int64_t size() const override { return shards_.empty() ? n_ : -1; }
  int64_t shards() const override { return static_cast<int64_t>(shards_.size()); }
  Record read(int64_t i) const override { return numbered(i); }
  std::unique_ptr<ShardReader> open(int64_t shard, int64_t offset) const override {
    struct Reader : ShardReader {
      int64_t first = 0, size = 0, at = 0;
      std::optional<PendingRecord> next() override {
        if (at == size) return std::nullopt;
        return [i = first + at++] { return numbered(i); };
      }
      int64_t offset() const override { return at; }
    };
    auto r = std::make_unique<Reader>();
    for (int64_t s = 0; s < shard; ++s) r->first += shards_[static_cast<size_t>(s)];
    r->size = shards_[static_cast<size_t>(shard)];
    r->at = offset;
    return r;
  }

 private:
  int64_t n_ = 0;
  std::vector<int64_t> shards_;
};

std::shared_ptr<const RecordSource> numbers(int64_t n) { return std::make_shared<Numbers>(n); }
std::shared_ptr<const RecordSource> shards(std::vector<int64_t> sizes) {
  return std::make_shared<Numbers>(std::move(sizes));
}

std::vector<int64_t> take(RecordStream& s, int64_t n) {
  std::vector<int64_t> out;
  while (n-- > 0) out.push_back(std::stoll(s.next().read().caption));
  return out;
}
std::vector<int64_t> range(int64_t n) {
  std::vector<int64_t> v(static_cast<size_t>(n));
  std::iota(v.begin(), v.end(), 0);
  return v;
}
std::vector<int64_t> sorted(std::vector<int64_t> v) {
  std::ranges::sort(v);
  return v;
}

TEST(RecordStream, EachEpochHasEveryRecordOnceInAnotherOrder) {
  for (const auto& source : {numbers(23), shards({7, 1, 10, 0, 5})}) {
    RecordStream s(source, {.seed = 3, .window = 8});
    std::set<std::vector<int64_t>> orders;
    for (int epoch = 0; epoch < 4; ++epoch) {
      const auto e = take(s, 23);
      EXPECT_EQ(sorted(e), range(23));
      orders.insert(e);
    }
    EXPECT_EQ(orders.size(), 4u);
  }
}

// S2-58, S4-59
TEST(RecordStream, WithoutShufflingRecordsComeAsStored) {
  for (const auto& source : {numbers(13), shards({3, 0, 9, 1})}) {
    RecordStream s(source, {.shuffle = false, .window = 4});
    EXPECT_EQ(take(s, 13), range(13));
    EXPECT_EQ(take(s, 13), range(13));
  }
}

TEST(RecordStream, AWindowMixesShards) {
  // 4 shards of 4, windows of 8: the first window shuffles two whole shards.
  RecordStream s(shards({4, 4, 4, 4}), {.seed = 1, .window = 8});
  const auto w = take(s, 8);
  std::set<int64_t> from;
  for (int64_t i : w) from.insert(i / 4);
  EXPECT_EQ(from.size(), 2u);
  EXPECT_FALSE(std::ranges::is_sorted(w));
}

TEST(RecordStream, SeekContinuesAsIfNeverInterruptedForAnyCut) {
  set_log_level(LogLevel::error);  // it warns many times about few shards
  for (const auto& source : {numbers(11), shards({11}), shards({4, 2, 5}), shards({1, 1, 0, 6, 3})}) {
    for (int64_t window : {1, 3, 4, 100}) {
      for (int64_t processes : {1, 2, 4}) {
        for (int64_t process = 0; process < std::min<int64_t>(processes, 2); ++process) {
          const StreamConfig c{.seed = 5, .window = window, .share = {process, processes, {}}};
          RecordStream whole(source, c);
          std::vector<std::pair<std::string, uint64_t>> expected;
          std::vector<Position> cuts;
          for (int i = 0; i < 30; ++i) {
            cuts.push_back(whole.position());
            auto n = whole.next();
            expected.emplace_back(n.read().caption, n.bits);
          }
          for (size_t cut = 0; cut < 30; ++cut) {
            RecordStream s(source, c);
            take(s, 2);  // from any position
            s.seek(cuts[cut]);
            EXPECT_EQ(s.position(), cuts[cut]);
            for (size_t i = cut; i < 30; ++i) {
              auto n = s.next();
              ASSERT_EQ(std::pair(n.read().caption, n.bits), expected[i])
                  << source->name() << " window " << window << " process " << process << " of " << processes << " cut "
                  << cut << " at " << i;
            }
          }
        }
      }
    }
  }
  set_log_level(LogLevel::info);
}

TEST(RecordStream, ProcessesShareTheRecordsOfAnEpoch) {
  // Records are dealt out by their number in the common order, also across the end of an epoch; positions agree.
  RecordStream all(numbers(10), {.seed = 2}), a(numbers(10), {.seed = 2, .share = {0, 3, {}}}),
      b(numbers(10), {.seed = 2, .share = {1, 3, {}}}), c(numbers(10), {.seed = 2, .share = {2, 3, {}}});
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(take(a, 1), take(all, 1));
    EXPECT_EQ(take(b, 1), take(all, 1));
    EXPECT_EQ(take(c, 1), take(all, 1));
    EXPECT_EQ(a.position(), b.position());
    EXPECT_EQ(c.position(), all.position());
  }
  // Whole shards if there are enough of them, else every n-th record.
  for (const auto& [source, sizes] :
       {std::pair(shards({3, 4, 5, 6}), std::pair(8, 10)), std::pair(shards({9}), std::pair(5, 4))}) {
    RecordStream first(source, {.seed = 2, .window = 3, .share = {0, 2, {}}}),
        second(source, {.seed = 2, .window = 3, .share = {1, 2, {}}});
    for (int epoch = 0; epoch < 2; ++epoch) {
      auto mine = take(first, sizes.first);
      const auto others = take(second, sizes.second);
      mine.insert(mine.end(), others.begin(), others.end());
      EXPECT_EQ(sorted(mine), range(sizes.first + sizes.second));
    }
  }
}

TEST(RecordStream, PositionsThatTheDataLacksContinueWithTheNextEpoch) {
  RecordStream a(numbers(5), {}), b(shards({3, 2}), {});
  EXPECT_FALSE(a.seek({.index = 6}));
  EXPECT_EQ(a.position(), (Position{.epoch = 1}));
  EXPECT_FALSE(a.seek({.epoch = 2, .index = 1, .shard = 1}));
  EXPECT_EQ(a.position(), (Position{.epoch = 3}));
  EXPECT_THROW(a.seek({.epoch = -1}), Error);
  EXPECT_FALSE(b.seek({.index = 3, .shard = 2, .consumed = 1}));
  EXPECT_EQ(b.position(), (Position{.epoch = 1}));
  EXPECT_FALSE(b.seek({.index = 9, .consumed = 9}));
  EXPECT_EQ(b.position(), (Position{.epoch = 1}));
  EXPECT_THROW(RecordStream(shards({0, 0}), {}).next(), Error);
  EXPECT_THROW(RecordStream(numbers(0), {}), Error);
}

// S4-28
TEST(FirstOf, CutsWhatIsStoredAndStreamsStillShuffle) {
  for (const auto& source : {numbers(9), shards({4, 0, 3, 2})}) {
    for (int64_t n : {1, 4, 6, 9, 20}) {
      const auto first = first_records(source, n);
      RecordStream s(first, {.seed = 1, .window = 5});
      const int64_t have = std::min<int64_t>(n, 9);
      EXPECT_EQ(sorted(take(s, have)), range(have));
      EXPECT_EQ(sorted(take(s, have)), range(have));
    }
    EXPECT_EQ(first_records(source, -1), source);
    EXPECT_THROW(first_records(source, 0), Error);
  }
}

/// Grey images whose brightness is their number; those in `bad` do not decode.
class Greys : public RecordSource {
 public:
  Greys(int64_t n, std::set<int64_t> bad) : RecordSource("greys", ""), n_(n), bad_(std::move(bad)) {}
  int64_t size() const override { return n_; }
  Record read(int64_t i) const override {
    Record r = numbered(i);
    if (bad_.contains(i)) {
      r.image = Blob::of("not an image");
      return r;
    }
    r.pixels = HostArray(Shape{DType::u8, {4, 6, 3}});
    std::ranges::fill(r.pixels.mutable_view<uint8_t>(), static_cast<uint8_t>(i));
    return r;
  }

 private:
  int64_t n_;
  std::set<int64_t> bad_;
};

Batch lengths(const std::vector<std::string>& captions) {
  std::vector<int32_t> v;
  for (const auto& c : captions) v.push_back(std::stoi(c));
  return {{"number", HostArray::of<int32_t>(Shape{DType::s32, {static_cast<int64_t>(v.size())}}, v)}};
}

TEST(ImageBatches, PixelsAndCaptionsStayTogetherAndBadImagesAreReplaced) {
  const auto source = std::make_shared<Greys>(10, std::set<int64_t>{2, 7});
  auto d = image_batches(source, {.resolution = 2}, {.stream = {.seed = 4}, .batch = 3, .workers = 2}, lengths);
  std::multiset<int32_t> seen;
  for (int i = 0; i < 8; ++i) {  // 24 images are 3 epochs of 8
    const Batch b = d->next();
    EXPECT_EQ(b.at("pixels").dims(), (Dims{3, 2, 2, 3}));
    for (size_t k = 0; k < 3; ++k) {
      const int32_t n = b.at("number").view<int32_t>()[k];
      EXPECT_EQ(b.at("pixels").view<uint8_t>()[k * 12], n);
      seen.insert(n);
    }
  }
  for (int32_t n : {0, 1, 3, 4, 5, 6, 8, 9}) EXPECT_EQ(seen.count(n), 3u) << n;
}

TEST(ImageBatches, GoOnFromASavedPosition) {
  const auto source = std::make_shared<Greys>(10, std::set<int64_t>{2, 7});
  const auto make = [&] {
    return prefetch(image_batches(source, {.resolution = 2}, {.stream = {.seed = 4}, .batch = 3}, lengths), 2);
  };
  auto whole = make();
  for (int i = 0; i < 5; ++i) whole->next();
  auto again = make();
  again->seek(whole->position());
  for (int i = 0; i < 5; ++i) {
    const auto a = whole->next().at("number"), b = again->next().at("number");
    EXPECT_TRUE(std::ranges::equal(a.view<int32_t>(), b.view<int32_t>()));
  }
}

TEST(ImageBatches, AnEpochWithoutAnyImageIsAnError) {
  const auto source = std::make_shared<Greys>(3, std::set<int64_t>{0, 1, 2});
  auto d = image_batches(source, {.resolution = 2}, {.batch = 2}, nullptr);
  try {
    d->next();
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("not a PNG, JPEG, WebP"), std::string::npos) << e.message();
  }
}

TEST(ImageBatches, RandomCropsAndFlipsFollowSeedEpochAndImage) {
  struct Ramp : RecordSource {
    Ramp() : RecordSource("ramp", "") {}
    int64_t size() const override { return 1; }
    Record read(int64_t) const override {
      Record r{.name = "ramp", .pixels = HostArray(Shape{DType::u8, {1, 16, 3}})};
      for (size_t i = 0; i < 48; ++i) r.pixels.mutable_view<uint8_t>()[i] = static_cast<uint8_t>(i / 3);
      return r;
    }
  };
  const auto values = [](ImageConfig c, uint64_t seed) {
    c.resolution = 1;
    auto d = image_batches(std::make_shared<Ramp>(), c, {.stream = {.seed = seed}, .batch = 800}, nullptr);
    const HostArray pixels = d->next().at("pixels");
    std::vector<int> v;
    for (size_t i = 0; i < 800; ++i) v.push_back(pixels.view<uint8_t>()[3 * i]);
    return v;
  };
  const auto crops = values({.random_crop = true}, 1);
  for (int place = 0; place < 16; ++place) EXPECT_NEAR(std::ranges::count(crops, place), 50, 35) << place;  // 5σ
  EXPECT_EQ(crops, values({.random_crop = true}, 1));
  EXPECT_NE(crops, values({.random_crop = true}, 2));
  int flips = 0;
  for (uint64_t i = 0; i < 1000; ++i) flips += random_placement({.random_flip = true}, mix(i)).flip;
  EXPECT_NEAR(flips, 500, 80);
  EXPECT_THROW(values({.center_crop = true, .random_crop = true}, 1), Error);
}

TEST(ArrayBatches, StackArraysAndRefuseOthers) {
  struct Rows : RecordSource {
    bool odd;
    explicit Rows(bool o) : RecordSource("rows", ""), odd(o) {}
    int64_t size() const override { return 4; }
    Record read(int64_t i) const override {
      const std::vector<float> v(odd && i == 3 ? 1 : 2, static_cast<float>(i));
      return {.name = fmt::format("row {}", i),
              .arrays = {{"x", HostArray::of<float>({DType::f32, {static_cast<int64_t>(v.size())}}, v)}}};
    }
  };
  auto d = array_batches(std::make_shared<Rows>(false), {.stream = {.shuffle = false}, .batch = 3});
  const auto x = d->next().at("x");
  EXPECT_EQ(x.dims(), (Dims{3, 2}));
  EXPECT_TRUE(std::ranges::equal(x.view<float>(), std::vector<float>{0, 0, 1, 1, 2, 2}));
  auto bad = array_batches(std::make_shared<Rows>(true), {.stream = {.shuffle = false}, .batch = 4});
  try {
    bad->next();
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.message(), "row 3: 'x' is f32[1]; in row 0 it is f32[2]");
  }
}

}  // namespace
}  // namespace md
