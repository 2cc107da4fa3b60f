#include "maxdiffusion/nn/param.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/shards.h"

namespace md {
namespace {

Param make(const std::string& path, Dims dims, Init init, int64_t stacked = 0) {
  Param p;
  p.path = path;
  p.model = "unet";
  p.input = "unet/" + path;
  p.shape = {DType::f32, std::move(dims)};
  p.init = init;
  p.stacked = stacked;
  return p;
}

TEST(LecunNormal, HasVarianceOneOverFanInAndIsCutAtTwoSigma) {
  const HostArray w = initial_value(make("w", {300, 20, 3, 3}, init::lecun_normal({300, 20, 3, 3})), 7);
  const auto v = w.view<float>();
  double sum = 0, squares = 0, largest = 0;
  for (float x : v) sum += x, squares += x * x, largest = std::max(largest, std::abs(double{x}));
  const double n = static_cast<double>(v.size()), stddev = std::sqrt(1.0 / 180);
  EXPECT_NEAR(sum / n, 0, 4 * stddev / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(squares / n) / stddev, 1, 0.02);
  EXPECT_LE(largest, 2 * stddev / 0.8796256610342398);
  EXPECT_GT(largest, 1.9 * stddev / 0.8796256610342398);
}

TEST(LecunNormal, RefusesAShapeWithoutFanIn) { EXPECT_THROW(init::lecun_normal({5}), Error); }

TEST(XavierUniform, HasVarianceTwoOverBothFans) {
  EXPECT_EQ(init::xavier_uniform({5, 2, 3}), init::uniform(std::sqrt(6.0 / 11)));
  EXPECT_THROW(init::xavier_uniform({5}), Error);
}

TEST(InitialValue, OfAStackedParameterIsThatOfItsLayers) {
  const Init init = init::normal(0.5);
  const HostArray all = initial_value(make("blocks.*.w", {3, 4, 5}, init, 3), 11);
  for (int64_t i = 0; i < 3; ++i) {
    const HostArray one = initial_value(make("blocks." + std::to_string(i) + ".w", {4, 5}, init), 11);
    for (size_t k = 0; k < 20; ++k)
      EXPECT_EQ(all.view<float>()[static_cast<size_t>(i) * 20 + k], one.view<float>()[k]) << i << " " << k;
  }
}

TEST(InitialValue, DependsOnSeedAndNameAndIndexAlone) {
  const Init init = init::uniform(1);
  // Large enough for several threads; its first elements must equal those of a small one.
  const HostArray large = initial_value(make("w", {1 << 17}, init), 3), small = initial_value(make("w", {64}, init), 3);
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(large.view<float>()[i], small.view<float>()[i]);
  EXPECT_NE(small.view<float>()[0], initial_value(make("w", {64}, init), 4).view<float>()[0]);
  EXPECT_NE(small.view<float>()[0], initial_value(make("v", {64}, init), 3).view<float>()[0]);
}

TEST(InitialValue, OfASliceIsThatSlice) {
  const Init kinds[] = {init::zeros(),     init::ones(),      init::constant(3),
                        init::normal(0.5), init::uniform(.1), {Init::Kind::truncated_normal, 0.02}};
  for (const Init& init : kinds)
    for (DType type : {DType::f32, DType::bf16})
      for (int64_t stacked : {0, 6}) {
        Param p = make(stacked ? "blocks.*.w" : "w", {6, 5, 8, 3}, init, stacked);
        p.shape.dtype = type;
        const ShardedArray whole = initial_value(p, 11);
        for (const Slice& s : {Slice::all(p.shape.dims), Slice{{2, 0, 0, 0}, {3, 5, 8, 3}},
                               Slice{{1, 2, 0, 0}, {1, 2, 8, 3}}, Slice{{0, 1, 4, 0}, {6, 3, 4, 3}},
                               Slice{{3, 0, 0, 2}, {2, 5, 8, 1}}, Slice{{5, 4, 7, 2}, {1, 1, 1, 1}}}) {
          const HostArray part = initial_value(p, 11, s), expected = whole.read(s);
          ASSERT_EQ(part.shape(), expected.shape());
          EXPECT_EQ(0, std::memcmp(part.data(), expected.data(), part.bytes())) << to_string(s) << " of " << stacked;
        }
      }
}

TEST(InitialValue, OfALargeSliceIsThatSlice) {  // several threads make it, and their ranges end within rows
  const Param p = make("w", {500, 333}, init::normal(1));
  const ShardedArray whole = initial_value(p, 3);
  for (const Slice& s : {Slice{{100, 0}, {400, 333}}, Slice{{7, 100}, {450, 201}}}) {
    const HostArray part = initial_value(p, 3, s), expected = whole.read(s);
    EXPECT_EQ(0, std::memcmp(part.data(), expected.data(), part.bytes())) << to_string(s);
  }
}

TEST(InitialValue, OfAPartOutsideIsRefused) {
  EXPECT_THROW(initial_value(make("w", {4, 4}, init::normal(1)), 1, {{3, 0}, {2, 4}}), Error);
  EXPECT_EQ(initial_value(make("w", {}, init::ones()), 1, {}).to_doubles(), std::vector<double>{1});
}

TEST(InitialValue, IsRoundedToTheStorageType) {
  Param p = make("w", {8}, init::normal(1));
  const HostArray f32 = initial_value(p, 1);
  p.shape.dtype = DType::bf16;
  EXPECT_EQ(initial_value(p, 1).to_doubles(), f32.cast(DType::bf16).to_doubles());
}

TEST(InitialValue, OfConstantsIsConstant) {
  EXPECT_EQ(initial_value(make("w", {2}, init::zeros()), 1).to_doubles(), (std::vector<double>{0, 0}));
  EXPECT_EQ(initial_value(make("w", {2}, init::ones()), 1).to_doubles(), (std::vector<double>{1, 1}));
  EXPECT_EQ(initial_value(make("w", {2}, init::constant(3)), 1).to_doubles(), (std::vector<double>{3, 3}));
}

TEST(ParamTable, CountsPerModelAndFindsByInput) {
  ParamTable t;
  t.add(make("a", {2, 3}, init::zeros()));
  Param other = make("a", {5}, init::zeros());
  other.model = "vae";
  t.add(other);
  EXPECT_EQ(t.count(), 11);
  EXPECT_EQ(t.count("vae"), 5);
  ASSERT_NE(t.find("vae/a"), nullptr);
  EXPECT_EQ(t.find("vae/a")->shape.dims, Dims{5});
  EXPECT_EQ(t.find("vae/b"), nullptr);
  EXPECT_THROW(t.add(other), Error);
}

}  // namespace
}  // namespace md
