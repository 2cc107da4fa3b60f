#include "maxdiffusion/nn/few_bits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/scope.h"

namespace md {
namespace {

HostArray random_matrix(const Dims& dims) {
  HostArray a({DType::f32, dims});
  std::mt19937 bits(3);
  std::normal_distribution<float> normal(0, 0.05F);
  for (float& v : a.mutable_view<float>()) v = normal(bits);
  return a;
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(FewBits, OfMatricesAreAsCloseAsTheirTypesSay) {
  const HostArray x = random_matrix({96, 192});
  for (const auto& [type, least, most] :
       {std::tuple{FewBitsType::int8, 1e-3, 1e-2}, {FewBitsType::float8, 1e-2, 3e-2}, {FewBitsType::nf4, 5e-2, 1e-1}}) {
    const std::vector<double> got = widened(type, few_bits_of(type, x)).to_doubles(), want = x.to_doubles();
    double apart = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i)
      apart += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
    EXPECT_GT(std::sqrt(apart / size), least);
    EXPECT_LT(std::sqrt(apart / size), most);
  }
}

TEST(FewBits, OfRowsOfZerosAreZeros) {
  HostArray x({DType::f32, {2, 128}});
  for (float& v : x.mutable_view<float>()) v = 0;
  for (const FewBitsType type : {FewBitsType::int8, FewBitsType::float8, FewBitsType::nf4})
    for (const double v : widened(type, few_bits_of(type, x)).to_doubles()) EXPECT_EQ(v, 0);
}

TEST(FewBits, AreOfMatricesInBlocksThatAreNotSkipped) {
  const FewBits all{FewBitsType::int8, {kOutsideBlocks, "attn2"}};
  EXPECT_TRUE(all.covers("blocks.3.attn1.to_q", {8, 8}));
  EXPECT_TRUE(all.covers("blocks.*.attn1.to_q", {8, 8}));
  EXPECT_FALSE(all.covers("blocks.3.attn2.to_q", {8, 8}));
  EXPECT_FALSE(all.covers("proj_out", {8, 8}));
  EXPECT_TRUE((FewBits{FewBitsType::int8, {}}).covers("proj_out", {8, 8}));
  EXPECT_FALSE(all.covers("blocks.0.conv", {8, 8, 3, 3}));
  const FewBits four{FewBitsType::nf4, {kOutsideBlocks}};
  EXPECT_TRUE(four.covers("blocks.0.up", {8, 128}));
  const std::string e = error_of([&] { four.covers("blocks.0.up", {8, 96}); });
  EXPECT_NE(e.find("'blocks.0.up' has rows of 96 numbers; expected a multiple of 64"), std::string::npos) << e;
  EXPECT_NE(e.find("base_quantization_skip=[outside_blocks, up]"), std::string::npos) << e;
  EXPECT_FALSE(four.covers("patch_embedding", {8, 96}));
  const FewBits everywhere{FewBitsType::nf4, {}};
  const std::string first = error_of([&] { everywhere.covers("proj_in", {8, 96}); });
  EXPECT_NE(first.find("base_quantization_skip=[proj_in], or int8"), std::string::npos) << first;
}

TEST(FewBits, AreParametersWithoutGradientsOfFrozenScopesAlone) {
  Graph g;
  ParamTable params;
  const Scope root(g, params, "m", {.few_bits = std::make_shared<const FewBits>(FewBits{FewBitsType::nf4, {}})});
  const Tensor x = g.input("x", {DType::f32, {4, 128}});
  nn::linear(root / "trained", x, {.out = 6});
  nn::linear(root.frozen() / "frozen", x, {.out = 6});
  std::vector<std::string> paths;
  for (const Param& p : params.params()) paths.push_back(p.path);
  EXPECT_EQ(paths,
            (std::vector<std::string>{"trained.weight", "trained.bias", "frozen.weight", "frozen.weight.absmax",
                                      "frozen.weight.nested_absmax", "frozen.weight.nested_offset", "frozen.bias"}));
  EXPECT_EQ(params.find("m/frozen.weight")->shape, (Shape{DType::u8, {6, 64}}));
  EXPECT_EQ(params.count(), 2 * (6 * 128 + 6));
  EXPECT_TRUE(has_few_bits(params, "m"));
  const ParamTable plain = before_few_bits(params, "m");
  EXPECT_EQ(plain.find("m/frozen.weight")->shape, (Shape{DType::f32, {6, 128}}));
  EXPECT_EQ(plain.params().size(), 4u);
}

}  // namespace
}  // namespace md
