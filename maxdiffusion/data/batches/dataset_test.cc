#include "maxdiffusion/data/batches/dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <set>
#include <thread>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

// `n` samples whose id is the sample's number and whose row is [number, −number].
HostArrays samples(int64_t n) {
  std::vector<int32_t> id(static_cast<size_t>(n));
  std::iota(id.begin(), id.end(), 0);
  std::vector<float> row;
  for (int32_t i : id) row.insert(row.end(), {static_cast<float>(i), static_cast<float>(-i)});
  return {{"id", HostArray::of<int32_t>(Shape{DType::s32, {n}}, id)},
          {"row", HostArray::of<float>(Shape{DType::f32, {n, 2}}, row)}};
}
std::vector<int32_t> ids(const Batch& b) {
  const auto v = b.at("id").view<int32_t>();
  return {v.begin(), v.end()};
}
std::vector<std::vector<int32_t>> take(Dataset& d, int n) {
  std::vector<std::vector<int32_t>> out;
  while (n-- > 0) out.push_back(ids(d.next()));
  return out;
}

// Counts its batches, and fails or waits at a chosen one.
class Counter : public Dataset {
 public:
  explicit Counter(int64_t fail_at = -1, std::atomic<int64_t>* made = nullptr) : fail_at_(fail_at), made_(made) {}
  Batch next() override {
    if (at_.index == fail_at_) fail(Code::io, "pictures/7.png: PNG: the file is truncated");
    if (made_) ++*made_;
    const std::vector<int32_t> v{static_cast<int32_t>(at_.index++)};
    return {{"id", HostArray::of<int32_t>(Shape{DType::s32, {1}}, v)}};
  }
  Position position() const override { return at_; }
  bool seek(Position p) override {
    at_ = p;
    return true;
  }
  int64_t size() const override { return 1000; }

 private:
  Position at_;
  int64_t fail_at_;
  std::atomic<int64_t>* made_;
};

TEST(InMemory, EachEpochHoldsEverySampleOnceInAnotherOrder) {
  auto d = in_memory(samples(12), 4, 7);
  std::set<std::vector<int32_t>> orders;
  for (int epoch = 0; epoch < 5; ++epoch) {
    std::vector<int32_t> all;
    for (const auto& b : take(*d, 3)) all.insert(all.end(), b.begin(), b.end());
    orders.insert(all);
    std::ranges::sort(all);
    std::vector<int32_t> expected(12);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all, expected);
    EXPECT_EQ(d->position(), (Position{epoch + 1, 0}));
  }
  EXPECT_EQ(orders.size(), 5u);
}

TEST(InMemory, ABatchContinuesIntoTheNextEpoch) {
  // 7 samples in batches of 3: 21 samples are 3 epochs.
  auto d = in_memory(samples(7), 3, 1);
  std::vector<int32_t> stream;
  for (const auto& b : take(*d, 7)) stream.insert(stream.end(), b.begin(), b.end());
  for (int64_t epoch = 0; epoch < 3; ++epoch)
    EXPECT_EQ(std::set<int32_t>(stream.begin() + epoch * 7, stream.begin() + epoch * 7 + 7).size(), 7u);
  auto small = in_memory(samples(2), 5, 1);
  const auto b = ids(small->next());
  EXPECT_EQ(std::ranges::count(b, 0) + std::ranges::count(b, 1), 5);
  EXPECT_EQ(small->position(), (Position{2, 1}));
}

TEST(InMemory, RowsStayTogetherAndSeedsDiffer) {
  auto a = in_memory(samples(50), 10, 1), same = in_memory(samples(50), 10, 1), other = in_memory(samples(50), 10, 2);
  auto plain = in_memory(samples(50), 10, 1, false);
  const Batch b = a->next();
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(b.at("row").view<float>()[2 * i], static_cast<float>(b.at("id").view<int32_t>()[i]));
    EXPECT_EQ(b.at("row").view<float>()[2 * i + 1], -static_cast<float>(b.at("id").view<int32_t>()[i]));
  }
  EXPECT_EQ(ids(b), ids(same->next()));
  EXPECT_NE(ids(b), ids(other->next()));
  EXPECT_EQ(ids(plain->next()), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(InMemory, TheOrderIsPartOfSavedPositionsAndNeverChanges) {
  // Computed by a second implementation with Python integers.
  EXPECT_EQ(ids(in_memory(samples(8), 8, 42)->next()), (std::vector<int32_t>{7, 1, 3, 5, 0, 6, 4, 2}));
}

TEST(InMemory, EverySampleIsAsLikelyInEveryPlace) {
  // 6 samples over 6000 epochs: each sample comes at each position 1000 ± 5σ (σ ≈ 29) times.
  auto d = in_memory(samples(6), 6, 3);
  int64_t counts[6][6] = {};
  for (int epoch = 0; epoch < 6000; ++epoch) {
    const auto b = ids(d->next());
    for (size_t place = 0; place < 6; ++place) ++counts[place][b[place]];
  }
  for (auto& row : counts) {
    for (int64_t c : row) EXPECT_NEAR(static_cast<double>(c), 1000.0, 150.0);
  }
}

TEST(Dataset, SeekContinuesAsIfNeverInterruptedForAnyCut) {
  for (int64_t n : {1, 2, 5, 7, 16}) {
    for (int64_t batch : {1, 3, 4, 7, 20}) {
      auto whole = in_memory(samples(n), batch, 9);
      const auto expected = take(*whole, 12);
      for (int cut = 0; cut < 12; ++cut) {
        for (int depth : {0, 1, 3}) {
          const auto make = [&] {
            auto d = in_memory(samples(n), batch, 9);
            return depth ? prefetch(std::move(d), depth) : std::move(d);
          };
          auto first = make();
          take(*first, cut);
          auto second = make();
          take(*second, 2);  // from any position
          second->seek(first->position());
          EXPECT_EQ(second->position(), first->position());
          EXPECT_EQ(take(*second, 12 - cut), std::vector(expected.begin() + cut, expected.end()))
              << n << " samples, batch " << batch << ", cut " << cut << ", depth " << depth;
        }
      }
    }
  }
}

TEST(Dataset, PositionsThatTheDataLacksContinueWithTheNextEpoch) {
  auto d = in_memory(samples(5), 2, 0);
  EXPECT_FALSE(d->seek({0, 6}));  // five samples: one was removed
  EXPECT_EQ(d->position(), (Position{.epoch = 1}));
  EXPECT_TRUE(d->seek({0, 3}));
  EXPECT_EQ(d->position(), (Position{.index = 3}));
  EXPECT_TRUE(d->seek({2, 5}));  // the end of an epoch
  EXPECT_EQ(d->position(), (Position{.epoch = 3}));
  EXPECT_THROW(d->seek({-1, 0}), Error);
  EXPECT_THROW(d->seek({0, -1}), Error);
}

TEST(InMemory, ArraysOfDifferentLengthAreRefusedWithTheirNames) {
  auto arrays = samples(5);
  arrays["row"] = samples(4)["row"];
  try {
    in_memory(arrays, 2, 0);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("'row' is f32[4,2]"), std::string::npos) << e.message();
  }
  EXPECT_THROW(in_memory({}, 2, 0), Error);
  EXPECT_THROW(in_memory(samples(5), 0, 0), Error);
}

TEST(Prefetch, HandsOutTheSourceInOrderAndStaysWithinItsDepth) {
  std::atomic<int64_t> made = 0;
  auto d = prefetch(std::make_unique<Counter>(-1, &made), 3);
  EXPECT_EQ(d->position(), (Position{0, 0}));
  for (int32_t i = 0; i < 100; ++i) {
    EXPECT_EQ(ids(d->next()), std::vector<int32_t>{i});
    EXPECT_EQ(d->position(), (Position{0, i + 1}));
    EXPECT_LE(made.load(), i + 1 + 3 + 1);  // returned, queued, in progress
  }
  EXPECT_EQ(d->size(), 1000);
}

TEST(Prefetch, RefusesADepthOfNothing) { EXPECT_THROW(prefetch(std::make_unique<Counter>(-1), 0), Error); }

TEST(Prefetch, AnErrorComesAfterTheBatchesMadeBeforeIt) {
  auto d = prefetch(std::make_unique<Counter>(4), 8);
  EXPECT_EQ(take(*d, 4).size(), 4u);
  for (int again = 0; again < 2; ++again) {
    try {
      d->next();
      FAIL();
    } catch (const Error& e) {
      EXPECT_NE(e.message().find("pictures/7.png"), std::string::npos);
    }
  }
  EXPECT_EQ(d->position(), (Position{0, 4}));
  d->seek({0, 5});  // after the bad sample
  EXPECT_EQ(ids(d->next()), std::vector<int32_t>{5});
}

TEST(Prefetch, ARefusedSeekIsThrownAgainByNext) {
  auto d = prefetch(in_memory(samples(5), 2, 0), 2);
  EXPECT_THROW(d->seek({0, -1}), Error);
  EXPECT_THROW(d->next(), Error);
  EXPECT_FALSE(d->seek({0, 6}));
  EXPECT_EQ(d->position(), (Position{.epoch = 1}));
  d->seek({0, 0});
  EXPECT_EQ(ids(d->next()), ids(in_memory(samples(5), 2, 0)->next()));
}

TEST(Prefetch, StopsWhileItsQueueIsFullOrTheErrorUnread) {
  for (int64_t fail_at : {-1, 0, 2}) {
    for (int wait = 0; wait < 3; ++wait) {
      auto d = prefetch(std::make_unique<Counter>(fail_at), 2);
      if (wait) std::this_thread::sleep_for(std::chrono::milliseconds(wait));
    }
  }
}

}  // namespace
}  // namespace md
