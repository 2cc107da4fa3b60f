#include "maxdiffusion/mesh/shards.h"

#include <gtest/gtest.h>

#include <numeric>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

HostArray counting(Dims dims) {
  HostArray a(Shape{DType::s32, std::move(dims)});
  auto v = a.mutable_view<int32_t>();
  std::iota(v.begin(), v.end(), 0);
  return a;
}
std::vector<int32_t> values(const HostArray& a) {
  const auto v = a.view<int32_t>();
  return {v.begin(), v.end()};
}
/// By definition: the elements of [3, 4] whose indices are in the slice.
std::vector<int32_t> expected(const Slice& s) {
  std::vector<int32_t> out;
  for (int64_t y = s.start[0]; y < s.start[0] + s.size[0]; ++y)
    for (int64_t x = s.start[1]; x < s.start[1] + s.size[1]; ++x) out.push_back(static_cast<int32_t>(y * 4 + x));
  return out;
}

TEST(ShardedArray, AnySliceIsReadFromAnyShards) {
  ShardedArray whole = counting({3, 4});
  ShardedArray rows{whole.shape, {}}, columns = rows, mixed = rows;
  for (int64_t y = 0; y < 3; ++y) rows.shards.push_back({{{y, 0}, {1, 4}}, whole.read({{y, 0}, {1, 4}})});
  for (int64_t x : {2, 0}) columns.shards.push_back({{{0, x}, {3, 2}}, whole.read({{0, x}, {3, 2}})});
  for (const Slice& s : {Slice{{0, 0}, {2, 3}}, Slice{{0, 3}, {2, 1}}, Slice{{2, 0}, {1, 4}}})
    mixed.shards.push_back({s, whole.read(s)});
  for (int64_t y = 0; y < 3; ++y)
    for (int64_t h = 1; y + h <= 3; ++h)
      for (int64_t x = 0; x < 4; ++x)
        for (int64_t w = 1; x + w <= 4; ++w) {
          const Slice s{{y, x}, {h, w}};
          for (const ShardedArray* a : {&whole, &rows, &columns, &mixed}) {
            EXPECT_TRUE(a->complete());
            const HostArray part = a->read(s);
            EXPECT_EQ(part.dims(), s.size);
            EXPECT_EQ(values(part), expected(s)) << to_string(s);
          }
        }
}

TEST(ShardedArray, ContiguousSlicesAreNotCopied) {
  const HostArray a = counting({3, 4});
  const ShardedArray whole = a;
  EXPECT_EQ(whole.whole().data(), a.data());
  EXPECT_EQ(whole.read({{1, 0}, {2, 4}}).data(), a.data() + 4 * sizeof(int32_t));
  EXPECT_EQ(whole.read({{1, 1}, {1, 2}}).data(), a.data() + 5 * sizeof(int32_t));
  const HostArray column = whole.read({{0, 1}, {3, 1}});
  EXPECT_TRUE(column.data() < a.data() || column.data() >= a.data() + a.bytes());
}

TEST(ShardedArray, TakenShardHasOneOwner) {
  ShardedArray a = counting({3, 4});
  EXPECT_EQ(values(a.take({{1, 0}, {2, 4}})), expected({{1, 0}, {2, 4}}));
  EXPECT_TRUE(a.complete()) << "a part of a shard was taken";
  HostArray whole = a.take(Slice::all({3, 4}));
  EXPECT_EQ(values(whole), expected({{0, 0}, {3, 4}}));
  EXPECT_TRUE(whole.sole());
  EXPECT_TRUE(a.shards.empty());
  const std::vector<HostArray> held = {whole};
  EXPECT_FALSE(whole.sole());
}

TEST(ShardedArray, ScalarsAreOneShard) {
  const ShardedArray scalar = counting({});
  EXPECT_TRUE(scalar.complete());
  EXPECT_EQ(values(scalar.read({})), std::vector<int32_t>{0});
}

TEST(ShardedArray, MissingShardsAreNotRead) {
  ShardedArray a = counting({3, 4});
  a.shards[0] = {{{0, 0}, {2, 4}}, a.read({{0, 0}, {2, 4}})};
  EXPECT_FALSE(a.complete());
  try {
    a.read({{1, 0}, {2, 2}});
    FAIL() << "read";
  } catch (const Error& e) {
    EXPECT_EQ(e.message(), "[1:3,0:2] of s32[3,4]: 2 of its 4 elements are here");
  }
  EXPECT_FALSE((ShardedArray{{DType::f32, {}}, {}}).complete());
}

TEST(TilingFault, NamesGapsOverlapsAndShardsOutside) {
  EXPECT_EQ(tiling_fault({3, 4}, {{{0, 0}, {3, 2}}, {{0, 2}, {3, 2}}}), "");
  EXPECT_EQ(tiling_fault({}, {{}}), "");
  EXPECT_EQ(tiling_fault({3, 4}, {{{0, 0}, {3, 2}}}), "the shards hold 6 of 12 elements of [3,4]");
  EXPECT_EQ(tiling_fault({3, 4}, {{{0, 0}, {3, 2}}, {{2, 1}, {1, 3}}}), "the shards [0:3,0:2] and [2:3,1:4] overlap");
  EXPECT_EQ(tiling_fault({3, 4}, {{{0, 3}, {3, 2}}}), "the shard [0:3,3:5] is outside [3,4]");
  EXPECT_EQ(tiling_fault({3, 4}, {{{0}, {3}}}), "the shard [0:3] is outside [3,4]");
}

}  // namespace
}  // namespace md
