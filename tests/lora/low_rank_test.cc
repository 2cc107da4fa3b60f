// Low-rank factors compared with the singular values of matrices constructed from known ones.
#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/lora/low_rank.h"

namespace md {
namespace {

/// A matrix [rows, columns] with singular values `values`: a sum of outer products of columns of two orthogonal
/// matrices.
HostArray with_singular_values(int64_t rows, int64_t columns, const std::vector<double>& values) {
  auto axis = [](int64_t n, size_t k, int64_t i) {  // rows of a cosine transform are orthonormal
    const double scale = std::sqrt((k == 0 ? 1.0 : 2.0) / static_cast<double>(n));
    return scale * std::cos(M_PI * (static_cast<double>(i) + 0.5) * static_cast<double>(k) / static_cast<double>(n));
  };
  HostArray m(Shape{DType::f32, {rows, columns}});
  auto v = m.mutable_view<float>();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (size_t k = 0; k < values.size(); ++k) sum += values[k] * axis(rows, k, i) * axis(columns, k, j);
      v[static_cast<size_t>(i * columns + j)] = static_cast<float>(sum);
    }
  return m;
}

/// up·down as [out, all other dims].
std::vector<double> product(const HostArray& down, const HostArray& up) {
  const std::vector<double> a = down.to_doubles(), b = up.to_doubles();
  const size_t r = static_cast<size_t>(down.dims()[0]), rest = a.size() / r, out = b.size() / r;
  std::vector<double> p(out * rest);
  for (size_t i = 0; i < out; ++i)
    for (size_t k = 0; k < r; ++k)
      for (size_t j = 0; j < rest; ++j) p[i * rest + j] += b[i * r + k] * a[k * rest + j];
  return p;
}

void expect_near(const std::vector<double>& got, const HostArray& want) {
  const std::vector<double> w = want.to_doubles();
  ASSERT_EQ(got.size(), w.size());
  for (size_t i = 0; i < w.size(); ++i) ASSERT_NEAR(got[i], w[i], 1e-5) << i;
}

TEST(LowRank, NearestMatricesKeepTheLargestSingularValues) {
  for (const auto& [rows, columns] : {std::pair{6, 9}, {9, 6}, {7, 7}}) {
    const HostArray change = with_singular_values(rows, columns, {5, 3, 2, 1});
    const LowRankFactors two = truncated_svd(change, 2);
    EXPECT_EQ(two.rank(), 2);
    EXPECT_NEAR(two.explained_variance, (25.0 + 9) / (25 + 9 + 4 + 1), 1e-6);
    expect_near(product(two.down, two.up), with_singular_values(rows, columns, {5, 3}));
    // A rank above the matrix's: all of it, and no more.
    const LowRankFactors all = truncated_svd(change, 6);
    EXPECT_EQ(all.rank(), 4);
    EXPECT_NEAR(all.explained_variance, 1, 1e-6);
    expect_near(product(all.down, all.up), change);
  }
  EXPECT_EQ(truncated_svd(with_singular_values(4, 4, {0}), 2).rank(), 1);
}

TEST(LowRank, ConvolutionsHaveTheSizesOfTheirLayer) {
  const HostArray change = with_singular_values(6, 18, {5, 3, 2}).reshaped({6, 2, 3, 3});
  const LowRankFactors t = truncated_svd(change, 3);
  EXPECT_EQ(t.down.dims(), (Dims{3, 2, 3, 3}));
  EXPECT_EQ(t.up.dims(), (Dims{6, 3, 1, 1}));
  expect_near(product(t.down, t.up), change);
}

TEST(LowRank, ResizedMatricesKeepTheLargestSingularValues) {
  // The product has known singular values; the factors themselves are scaled differently.
  const HostArray change = with_singular_values(8, 10, {6, 4, 2, 1});
  const LowRankFactors whole = truncated_svd(change, 4);
  HostArray up(whole.up.shape()), down(whole.down.shape());
  std::ranges::transform(whole.up.view<float>(), up.mutable_view<float>().begin(), [](float v) { return v * 4; });
  std::ranges::transform(whole.down.view<float>(), down.mutable_view<float>().begin(), [](float v) { return v / 4; });
  const LoraPair pair{down, up, 4};
  const LowRankFactors two = resized(pair, 2);
  EXPECT_EQ(two.rank(), 2);
  EXPECT_NEAR(two.explained_variance, (36.0 + 16) / (36 + 16 + 4 + 1), 1e-6);
  expect_near(product(two.down, two.up), with_singular_values(8, 10, {6, 4}));
  // Explained variance: 52 of 57 is 0.912, 56 of 57 is 0.982.
  EXPECT_EQ(resized(pair, 4, 0.91).rank(), 2);
  EXPECT_EQ(resized(pair, 4, 0.92).rank(), 3);
  EXPECT_EQ(resized(pair, 2, 0.99).rank(), 2);
  expect_near(product(resized(pair, 4).down, resized(pair, 4).up), change);
  // A rank larger than the layer's dims is allowed.
  const HostArray narrow = with_singular_values(2, 3, {3, 1});
  LoraPair wide{HostArray(Shape{DType::f32, {5, 3}}), HostArray(Shape{DType::f32, {2, 5}}), 5};
  std::ranges::fill(wide.down.mutable_view<float>(), 0.0f);
  std::ranges::fill(wide.up.mutable_view<float>(), 0.0f);
  std::ranges::copy(narrow.view<float>().first(3), wide.down.mutable_view<float>().begin());
  std::ranges::copy(narrow.view<float>().last(3), wide.down.mutable_view<float>().begin() + 3);
  wide.up.mutable_view<float>()[0] = wide.up.mutable_view<float>()[6] = 1;
  expect_near(product(resized(wide, 5).down, resized(wide, 5).up), narrow);
}

}  // namespace
}  // namespace md
