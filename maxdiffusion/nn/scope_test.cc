#include "maxdiffusion/nn/scope.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

struct ScopeTest : testing::Test {
  Graph g;
  ParamTable table;
  Scope root(const ScopeOptions& options = {}) { return Scope(g, table, "unet", options); }
  std::vector<std::string> paths() const {
    std::vector<std::string> out;
    for (const Param& p : table.params()) out.push_back(p.path);
    return out;
  }
};

TEST_F(ScopeTest, ParametersAreInputsNamedByModelAndPath) {
  Tensor w = (root({.weights = DType::bf16}) / "blocks" / 3 / "norm").param("weight", {4}, {"embed"}, init::ones());
  EXPECT_EQ(to_string(w.shape()), "bf16[4]");
  ASSERT_EQ(g.inputs().size(), 1u);
  EXPECT_EQ(g.inputs()[0].name, "unet/blocks.3.norm.weight");
  EXPECT_EQ(g.inputs()[0].axes, LogicalAxes{"embed"});
  const Param* p = table.find("unet/blocks.3.norm.weight");
  ASSERT_NE(p, nullptr);
  EXPECT_EQ(p->path, "blocks.3.norm.weight");
  EXPECT_EQ(p->value, w);
  EXPECT_TRUE(p->trainable);
}

TEST_F(ScopeTest, AskingTwiceIsAnErrorThatNamesTheParameter) {
  const Scope s = root();
  s.param("weight", {4}, {}, init::ones());
  try {
    s.param("weight", {4}, {}, init::ones());
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("unet/weight"), std::string::npos) << e.what();
  }
}

TEST_F(ScopeTest, FrozenParametersAreNotTrainableWhateverAnswers) {
  root().frozen().param("a", {1}, {}, init::ones());
  const Scope::Source pass = [](const Scope& below, Param p) { return below.resolve(std::move(p)); };
  root().with_source(pass).frozen().param("b", {1}, {}, init::ones());
  (root().with_source(pass) / "child").param("c", {1}, {}, init::ones());
  EXPECT_FALSE(table.find("unet/a")->trainable);
  EXPECT_FALSE(table.find("unet/b")->trainable);
  EXPECT_TRUE(table.find("unet/child.c")->trainable);
}

TEST_F(ScopeTest, ASourceCanAddParametersToAnotherOnes) {
  const Scope s = root().with_source([](const Scope& below, Param p) {
    Param delta = p;
    delta.path += ".delta";
    Tensor w = below.frozen().resolve(std::move(p));
    return w + below.resolve(std::move(delta));
  });
  Tensor w = (s / "lin").param("weight", {2, 2}, {}, init::ones());
  EXPECT_EQ(std::string(w.node()->op->name), "add");
  EXPECT_EQ(paths(), (std::vector<std::string>{"lin.weight", "lin.weight.delta"}));
  EXPECT_FALSE(table.params()[0].trainable);
  EXPECT_TRUE(table.params()[1].trainable);
}

TEST_F(ScopeTest, VariationsOfProductsNest) {
  auto adds = [](const char* name) {
    return [name](const Scope& before, const Weight& w, Tensor x, const Product& f) {
      Weight weight = w;
      weight.name = name;
      Tensor y = f(x, before.param(weight.name, weight.dims, weight.axes, weight.init));
      return before.product(w, x, f) + y;
    };
  };
  const Scope s = root().with_product(adds("first")).with_product(adds("second"));
  nn::linear(s / "lin", g.input("x", {DType::f32, {2, 3}}), {.out = 5, .bias = false});
  EXPECT_EQ(paths(), (std::vector<std::string>{"lin.second", "lin.first", "lin.weight"}));
}

TEST_F(ScopeTest, NodesCarryThePathOfTheirLayer) {
  Tensor x = g.input("x", {DType::f32, {2, 3}});
  Tensor y = nn::linear(root() / "a" / "b", x, {.out = 5});
  EXPECT_EQ(*y.node()->path, "a.b");
}

Tensor block(const Scope& s, Tensor x) { return x + nn::linear(s / "lin", x, {.out = x.dim(-1), .in_axis = "embed"}); }

TEST_F(ScopeTest, RepeatWithoutScanMakesOneParameterPerLayer) {
  nn::repeat(root() / "blocks", 2, g.input("x", {DType::f32, {2, 3}}), block);
  EXPECT_EQ(paths(), (std::vector<std::string>{"blocks.0.lin.weight", "blocks.0.lin.bias", "blocks.1.lin.weight",
                                               "blocks.1.lin.bias"}));
}

TEST_F(ScopeTest, RepeatWithScanStacksParameters) {
  Tensor y = nn::repeat(root({.scan_layers = true}) / "blocks", 2, g.input("x", {DType::f32, {2, 3}}), block);
  EXPECT_EQ(&y.graph(), &g);
  EXPECT_EQ(paths(), (std::vector<std::string>{"blocks.*.lin.weight", "blocks.*.lin.bias"}));
  const Param& w = table.params()[0];
  EXPECT_EQ(w.shape.dims, (Dims{2, 3, 3}));
  EXPECT_EQ(w.axes, (LogicalAxes{"", "", "embed"}));
  EXPECT_EQ(w.stacked, 2);
  EXPECT_EQ(w.init, init::lecun_normal({3, 3}));
}

TEST_F(ScopeTest, ARepeatInsideAStackedBlockIsWrittenOut) {
  auto outer = [](const Scope& s, Tensor x) { return nn::repeat(s / "inner", 2, x, block); };
  nn::repeat(root({.scan_layers = true}) / "outer", 3, g.input("x", {DType::f32, {2, 3}}), outer);
  EXPECT_EQ(paths(), (std::vector<std::string>{"outer.*.inner.0.lin.weight", "outer.*.inner.0.lin.bias",
                                               "outer.*.inner.1.lin.weight", "outer.*.inner.1.lin.bias"}));
}

TEST_F(ScopeTest, OneLayerIsNotALoop) {
  nn::repeat(root({.scan_layers = true}) / "blocks", 1, g.input("x", {DType::f32, {2, 3}}), block);
  EXPECT_EQ(paths(), (std::vector<std::string>{"blocks.0.lin.weight", "blocks.0.lin.bias"}));
}

TEST_F(ScopeTest, LayersNameTheirPathInErrors) {
  Tensor x = g.input("x", {DType::f32, {2, 4, 4, 6}});
  auto message = [](auto f) {
    try {
      f();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(message([&] { nn::group_norm(root() / "n1", x, 4, 1e-5); }).find("n1"), std::string::npos);
  EXPECT_NE(message([&] { nn::multi_head_attention(root() / "at", x, x, {.heads = 4}); }).find("at"),
            std::string::npos);
  EXPECT_NE(message([&] { nn::activation("swiglu", x); }).find("quick_gelu"), std::string::npos);
}

// S0-84, S2-14, S4-14
TEST(ScopePrecision, ReachesEveryProduct) {
  const std::pair<Precision, std::string> all[] = {
      {Precision::default_, "DEFAULT"}, {Precision::high, "HIGH"}, {Precision::highest, "HIGHEST"}};
  for (const auto& [precision, name] : all) {
    Graph g;
    ParamTable table;
    const Scope s(g, table, "unet", {.precision = precision});
    Tensor x = nn::conv2d(s / "conv", g.input("x", {DType::f32, {2, 4, 4, 8}}), {.out = 8});
    Tensor y = reshape(x, {2, 16, 8});
    g.output("y", nn::multi_head_attention(s / "attention", y, y, {.heads = 2}));
    const std::string text = to_stablehlo(g);
    for (const auto& [other, word] : all) {
      int count = 0;
      for (size_t at = 0; (at = text.find("precision " + word + ">", at)) != std::string::npos; ++at) ++count;
      EXPECT_EQ(count, other == precision ? 2 * 7 : 0) << name << " " << word;  // convolution, 4 projections, q·k, ·v
    }
  }
}

}  // namespace
}  // namespace md
