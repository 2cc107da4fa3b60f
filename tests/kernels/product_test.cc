#include "maxdiffusion/kernels/processor.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

struct Case {
  Dims a, b;
  DotDims dims;
};
DotDims contract(Axes lhs, Axes rhs, Axes lhs_batch = {}, Axes rhs_batch = {}) {
  return {.lhs_contract = std::move(lhs),
          .rhs_contract = std::move(rhs),
          .lhs_batch = std::move(lhs_batch),
          .rhs_batch = std::move(rhs_batch)};
}
TensorFn product(const Case& c) {
  return [c](const std::vector<Tensor>& in) { return std::vector{dot(in[0], in[1], c.dims)}; };
}
std::vector<HostArray> inputs(const Case& c, DType type) { return {normal({type, c.a}, 1), normal({type, c.b}, 2)}; }

class ProductKernel : public testing::TestWithParam<Case> {};

// The gradients are products too, with other axis orders.
TEST_P(ProductKernel, AgreesWithTheCompilersOwnInF64) {
  const Case& c = GetParam();
  expect_agreement(product(c), inputs(c, DType::f32), 2e-6, {"md_product"});
}
TEST_P(ProductKernel, WidensBf16AndRoundsItsResultOnce) {
  const Case& c = GetParam();
  expect_agreement(product(c), inputs(c, DType::bf16), 4e-3, {"md_product"});
}
TEST_P(ProductKernel, TakesBf16AsItIs) {
  if (!runs_bf16_products()) GTEST_SKIP() << "this processor has no products of bf16";
  const Case& c = GetParam();
  expect_agreement(product(c), inputs(c, DType::bf16), 4e-3, {"md_product"}, true);
}

INSTANTIATE_TEST_SUITE_P(
    Orders, ProductKernel,
    testing::Values(Case{{130, 72}, {40, 72}, contract({1}, {1})},                 // x·Wᵀ
                    Case{{2, 65, 72}, {40, 72}, contract({2}, {1})},               // batched
                    Case{{1, 77, 72}, {1, 72, 50}, contract({2}, {1})},            // axes of size 1
                    Case{{77, 72}, {72, 50}, contract({1}, {0})},                  //
                    Case{{90, 64}, {90, 72}, contract({0}, {0})},                  // over rows
                    Case{{3, 50, 40}, {3, 60, 40}, contract({2}, {2}, {0}, {0})},  // batch dims
                    Case{{2, 2, 50, 40}, {2, 2, 40, 60}, contract({3}, {2}, {0, 1}, {0, 1})},
                    Case{{5, 8, 9, 10}, {8, 9, 10, 73}, contract({1, 2, 3}, {0, 1, 2})},
                    Case{{1100, 16}, {16, 17}, contract({1}, {0})},  // more rows than a thread widens at once
                    Case{{2, 24, 512}, {2, 20, 512}, contract({2}, {2}, {0}, {0})},  // strided cache lines
                    Case{{40, 1024}, {40, 512}, contract({0}, {0})},                 // parts of lines that are
                    Case{{1, 640}, {640, 420}, contract({1}, {0})},
                    Case{{40, 1024}, {1100, 1024}, contract({1}, {1})},    // few rows: divided by columns
                    Case{{33, 1200}, {1200, 1030}, contract({1}, {0})}));  // as well

TEST(ProductKernelInGraphs, MakesSumsOfBf16InF32WhereTheyAreWanted) {
  expect_agreement(
      [](const std::vector<Tensor>& in) {
        return std::vector{
            dot(in[0], in[1], contract({1}, {0}), in[0].dtype() == DType::f64 ? DType::f64 : DType::f32)};
      },
      {normal({DType::bf16, {80, 90}}, 1), normal({DType::bf16, {90, 70}}, 2)}, 4e-3, {"md_product"});
}

/// x·Wᵀ + b as layers compute it: x in the activation type, w and b in their stored type.
TensorFn linear() {
  return [](const std::vector<Tensor>& in) {
    const Tensor y = dot(in[0], cast(in[1], in[0].dtype()), contract({in[0].rank() - 1}, {1}));
    return std::vector{add_bias(y, in[2])};
  };
}
std::vector<HostArray> layer(DType x) {
  return {normal({x, {3, 50, 72}}, 1), normal({DType::f32, {40, 72}}, 2), normal({DType::f32, {40}}, 3)};
}

TEST(ProductKernelInGraphs, AddsABias) {
  expect_agreement(linear(), layer(DType::f32), 2e-6, {"md_product", "md_column_sums"});
  for (bool as_they_are : ways_of_bf16())
    for (const auto& xs : {layer(DType::bf16),
                           std::vector{normal({DType::bf16, {40, 1024}}, 1),
                                       normal({DType::bf16, {1100, 1024}}, 2, 0.03), normal({DType::f32, {1100}}, 3)}})
      expect_agreement(linear(), xs, 4e-3, {"md_product", "md_column_sums"}, as_they_are);
}

// Sums of bf16 products are as exact as those of f32, and are not rounded on their way to the optimizer.
TEST(ProductKernelInGraphs, LeavesGradientsOfF32WeightsUnrounded) {
  const std::vector<HostArray> xs = layer(DType::bf16), dys = {normal({DType::bf16, {3, 50, 40}}, 4)};
  std::vector<HostArray> wide_xs, wide_dys = {dys[0].cast(DType::f64)};
  for (const HostArray& x : xs) wide_xs.push_back(x.cast(DType::f64));
  const auto expected = outputs_and_gradients(linear(), wide_xs, wide_dys, {});
  for (bool as_they_are : ways_of_bf16()) {
    const auto found = outputs_and_gradients(linear(), xs, dys, {.callable = true, .bf16_products = as_they_are});
    EXPECT_LE(relative_error(found[2], expected[2]), 2e-6) << "of w";
    EXPECT_LE(relative_error(found[3], expected[3]), 2e-6) << "of b";
    EXPECT_LE(relative_error(found[1], expected[1]), 4e-3) << "of x";
  }
}

// Both operands were rounded from f32: the kernel reads the f32 values, and must still round them.
TEST(ProductKernelInGraphs, RoundsOperandsThatItReadsInF32) {
  if (!runs_bf16_products()) GTEST_SKIP() << "this processor has no products of bf16";
  const HostArray a = normal({DType::f32, {90, 72}}, 1), b = normal({DType::f32, {72, 40}}, 2);
  auto rounded = [](const std::vector<Tensor>& in) {
    return std::vector{dot(cast(in[0], DType::bf16), cast(in[1], DType::bf16), contract({1}, {0}), DType::f32)};
  };
  auto plain = [](const std::vector<Tensor>& in) { return std::vector{dot(in[0], in[1], contract({1}, {0}))}; };
  auto result = [](const TensorFn& f, const std::vector<HostArray>& xs, CpuKernels kernels) {
    return outputs_and_gradients(f, xs, {HostArray({xs[0].shape().dtype, {90, 40}})}, kernels)[0];
  };
  const HostArray found = result(rounded, {a, b}, {.callable = true, .bf16_products = true});
  auto round = [](const HostArray& x) { return x.cast(DType::bf16).cast(DType::f64); };
  EXPECT_LE(relative_error(found, result(plain, {round(a), round(b)}, {})), 1e-6);
}

// One call computes y, so the separate product and sum are unused.
TEST(ProductKernelInGraphs, TakesTheBiasWhereTheProductHasNoOtherReader) {
  auto text = [](bool read_twice) {
    GraphOptions options = one_device().graph_options();
    options.cpu_kernels = {.callable = true, .f32_products = true};
    Graph g(options);
    const Tensor x = g.input("x", {DType::f32, {90, 72}}), w = g.input("w", {DType::f32, {80, 72}}),
                 b = g.input("b", {DType::f32, {80}}), y = dot(x, w, contract({1}, {1}));
    g.output("y", add_bias(y, b));
    if (read_twice) g.output("product", y);
    return to_stablehlo(g);
  };
  EXPECT_EQ(count(text(false), "\"md_add\""), 0u);
  EXPECT_EQ(count(text(true), "\"md_add\""), 1u);
  for (bool twice : {false, true}) EXPECT_EQ(count(text(twice), "\"md_product\""), 1u);
}

TEST(ColumnSumsKernel, AgreesWithTheCompilersOwnInF64) {
  auto sums = [](const std::vector<Tensor>& in) {
    const Tensor y = sum(in[0], {0, 1});
    return std::vector{y.dtype() == DType::bf16 ? cast(y, DType::f32) : y};  // unrounded
  };
  for (DType type : {DType::f32, DType::bf16})
    expect_agreement(sums, {normal({type, {3, 500, 77}}, 1, 1, 0.5)}, type == DType::bf16 ? 4e-3 : 1e-6,
                     {"md_column_sums"});
  const std::vector<HostArray> x = {normal({DType::bf16, {3, 500, 77}}, 1, 1, 0.5)},
                               dy = {normal({DType::f32, {77}}, 2)};
  const auto found = outputs_and_gradients(sums, x, dy, {.callable = true}),
             expected = outputs_and_gradients(sums, {x[0].cast(DType::f64)}, {dy[0].cast(DType::f64)}, {});
  EXPECT_LE(relative_error(found[0], expected[0]), 1e-6);
}

std::string text_of(const Case& c, CpuKernels kernels, DType type = DType::bf16) {
  GraphOptions options = one_device().graph_options();
  options.cpu_kernels = kernels;
  Graph g(options);
  g.output("y", product(c)({g.input("a", {type, c.a}), g.input("b", {type, c.b})})[0]);
  return to_stablehlo(g);
}

TEST(ProductKernelInGraphs, LeavesSmallAndUnevenProductsToTheCompiler) {
  const Case small{{8, 8}, {8, 8}, contract({1}, {0})};
  const Case uneven{{3, 50, 4, 40}, {3, 60, 4, 40}, contract({3}, {3}, {0, 2}, {0, 2})};
  for (const Case& c : {small, uneven}) EXPECT_EQ(text_of(c, {.callable = true}).find("md_product"), std::string::npos);
}

TEST(ProductKernelInGraphs, LeavesF32ToTheCompilerWhereThatIsFaster) {
  const Case c{{130, 72}, {40, 72}, contract({1}, {1})};
  EXPECT_NE(text_of(c, {.callable = true, .f32_products = true}, DType::f32).find("md_product"), std::string::npos);
  EXPECT_EQ(text_of(c, {.callable = true}, DType::f32).find("md_product"), std::string::npos);
  EXPECT_NE(text_of(c, {.callable = true}).find("md_product"), std::string::npos);
}

// A cached program must not be loaded on a machine that would choose other kernels.
TEST(ProductKernelInGraphs, IsAnotherProgramWhereProductsAreOfBf16) {
  const Case c{{130, 72}, {40, 72}, contract({1}, {1})};
  EXPECT_NE(text_of(c, {.callable = true}), text_of(c, {.callable = true, .bf16_products = true}));
}

TEST(Processor, IsProbedOnce) {
  EXPECT_EQ(processor().describe(), processor().describe());
  const CpuKernels kernels = one_device().graph_options().cpu_kernels;
  EXPECT_EQ(kernels.f32_products, processor().wide_vectors);
  EXPECT_EQ(kernels.bf16_products, processor().bf16_products);
  EXPECT_TRUE(!processor().bf16_products || processor().isa.starts_with("avx512_core_")) << processor().isa;
}

}  // namespace
}  // namespace md
