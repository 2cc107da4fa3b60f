#include "maxdiffusion/base/host_array_rows.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

/// An array with the values 0, 1, 2, …
HostArray counted(Dims dims) {
  HostArray a(Shape{DType::f32, std::move(dims)});
  auto v = a.mutable_view<float>();
  std::iota(v.begin(), v.end(), 0.0f);
  return a;
}
std::vector<double> values(const HostArray& a) { return a.to_doubles(); }

TEST(HostArrayRows, PastTheEndTheLastRepeats) {
  const HostArray a = rows(counted({3, 2}), 1, 4);
  EXPECT_EQ(a.dims(), (Dims{4, 2}));
  EXPECT_EQ(values(a), (std::vector<double>{2, 3, 4, 5, 4, 5, 4, 5}));
}

TEST(HostArrayRows, AreCutAndWrittenAlongAxisOneToo) {
  HostArray a = counted({2, 3, 2});
  const HostArray b = block(a, 1, 2, 1, 3);
  EXPECT_EQ(b.dims(), (Dims{2, 3, 2}));
  EXPECT_EQ(values(b), (std::vector<double>{8, 9, 10, 11, 10, 11, 8, 9, 10, 11, 10, 11}));
  set_block(a, 1, 2, counted({2, 2, 2}));
  EXPECT_EQ(values(a), (std::vector<double>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1}));
}

TEST(HostArrayRows, AreWrittenAsFarAsTheArrayGoes) {
  HostArray a = counted({3, 2});
  set_rows(a, 2, counted({2, 2}));
  EXPECT_EQ(values(a), (std::vector<double>{0, 1, 2, 3, 0, 1}));
}

TEST(HostArrayRows, RepeatOneAfterTheOther) {
  const HostArray a = repeat_rows(counted({2, 2}), 2);
  EXPECT_EQ(a.dims(), (Dims{4, 2}));
  EXPECT_EQ(values(a), (std::vector<double>{0, 1, 0, 1, 2, 3, 2, 3}));
}

TEST(HostArrayRows, WithoutBatchOnlyTheFirstAxisGoes) {
  EXPECT_EQ(without_batch(counted({1, 2, 1})).dims(), (Dims{2, 1}));
  EXPECT_THROW(without_batch(counted({2, 3})), Error);
}

TEST(HostArrayRows, ZerosHaveTheShape) {
  const HostArray a = zeros_like(counted({2, 2}));
  EXPECT_EQ(a.shape(), (Shape{DType::f32, {2, 2}}));
  EXPECT_EQ(values(a), std::vector<double>(4, 0));
}

TEST(HostArrayRows, ChannelsMoveToTheEndAndBack) {
  const HostArray a = counted({2, 2, 1, 3}), b = channels_last(a);
  EXPECT_EQ(b.dims(), (Dims{2, 1, 3, 2}));
  EXPECT_EQ(values(b), (std::vector<double>{0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11}));
  EXPECT_EQ(channels_first(b).dims(), a.dims());
  EXPECT_EQ(values(channels_first(b)), values(a));
}

TEST(WithAxes, PutsThemInAnotherOrderAndBack) {
  HostArray a(Shape{DType::bf16, {2, 3, 4, 5}});
  auto v = a.mutable_view<uint16_t>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint16_t>(i);
  const Axes order = {2, 3, 1, 0};
  const HostArray turned = with_axes(a, order);
  EXPECT_EQ(turned.dims(), (Dims{4, 5, 3, 2}));
  EXPECT_EQ(turned.view<uint16_t>()[((3 * 5 + 1) * 3 + 2) * 2 + 1], ((1 * 3 + 2) * 4 + 3) * 5 + 1);
  const HostArray back = with_axes(turned, inverse(order));
  EXPECT_EQ(back.shape(), a.shape());
  EXPECT_TRUE(std::ranges::equal(back.view<uint16_t>(), a.view<uint16_t>()));
}

}  // namespace
}  // namespace md
