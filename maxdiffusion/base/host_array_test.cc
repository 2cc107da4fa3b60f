#include "maxdiffusion/base/host_array.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

TEST(HostArray, KeepsValuesAndAligns) {
  std::vector<float> values = {1, 2, 3, 4, 5, 6};
  HostArray a = HostArray::of<float>({DType::f32, {2, 3}}, values);
  EXPECT_TRUE(a);
  EXPECT_EQ(a.bytes(), 24u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0u);
  EXPECT_EQ(a.view<float>()[4], 5);
  EXPECT_EQ(a.to_doubles(), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_FALSE(HostArray());
}

TEST(HostArray, RefusesViewsOfAnotherSize) {
  HostArray a(Shape{DType::bf16, {4}});
  EXPECT_THROW(a.view<float>(), Error);
  EXPECT_NO_THROW(a.view<uint16_t>());
  std::vector<float> three = {1, 2, 3};
  EXPECT_THROW(HostArray::of<float>(Shape{DType::f32, {4}}, three), Error);
}

TEST(HostArray, ReshapeSharesTheBytes) {
  HostArray a(Shape{DType::f32, {2, 6}});
  HostArray b = a.reshaped({3, 4});
  EXPECT_EQ(b.data(), a.data());
  EXPECT_EQ(b.dims(), (Dims{3, 4}));
  EXPECT_THROW(a.reshaped({5}), Error);
}

TEST(HostArray, BorrowedBytesAreReadOnlyAndKeepTheirOwner) {
  auto owner = std::make_shared<std::vector<int32_t>>(std::vector<int32_t>{7, 8});
  std::weak_ptr<std::vector<int32_t>> watch = owner;
  {
    HostArray a(Shape{DType::s32, {2}}, owner, owner->data());
    owner.reset();
    EXPECT_FALSE(watch.expired());
    EXPECT_EQ(a.view<int32_t>()[1], 8);
    EXPECT_THROW(a.mutable_data(), Error);
  }
  EXPECT_TRUE(watch.expired());
}

TEST(HostArray, CastRoundsToNearestEven) {
  std::vector<float> values = {1.0f, 1.00390625f, 1.01171875f, -3.5f};  // the second and third are midpoints in bf16
  HostArray a = HostArray::of<float>(Shape{DType::f32, {4}}, values);
  EXPECT_EQ(a.cast(DType::bf16).to_doubles(), (std::vector<double>{1.0, 1.0, 1.015625, -3.5}));
  EXPECT_EQ(a.cast(DType::bf16).cast(DType::f32).dtype(), DType::f32);
  EXPECT_EQ(a.cast(DType::s32).to_doubles(), (std::vector<double>{1, 1, 1, -3}));
  EXPECT_EQ(a.cast(DType::f64).cast(DType::f32).to_doubles(), a.to_doubles());
  EXPECT_EQ(a.cast(DType::f32).data(), a.data());
}

TEST(HostArray, MayBeEmpty) {
  HostArray a(Shape{DType::f32, {0, 3}});
  EXPECT_TRUE(a);
  EXPECT_TRUE(a.to_doubles().empty());
  EXPECT_EQ(a.cast(DType::bf16).bytes(), 0u);
}

}  // namespace
}  // namespace md
