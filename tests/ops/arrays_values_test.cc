// Properties of whole-array operations that gradient checks miss: order, clamping, accumulation, dilation. Each is
// compared with plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/conv.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/ops/evaluate.h"

namespace md {
namespace {

using Tensors = std::vector<Tensor>;
using Doubles = std::vector<double>;
const double kNan = std::numeric_limits<double>::quiet_NaN();

Doubles random_values(const Dims& dims, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
  Doubles v(static_cast<size_t>(Shape{DType::f64, dims}.elements()));
  for (double& x : v) x = uniform(random);
  return v;
}

void expect_near(const HostArray& found, const Doubles& expected, double tolerance, const std::string& what = "") {
  auto values = found.to_doubles();
  ASSERT_EQ(values.size(), expected.size()) << what;
  for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], tolerance) << what << " element " << i;
}

/// Convolution by definition. x: [B, spatial…, Ci], w: [Co, Ci/groups, k…].
Doubles naive_conv(const Doubles& x, const Dims& xd, const Doubles& w, const Dims& wd, const ConvOptions& o,
                   const Dims& yd) {
  // Extends one to three spatial axes to three: missing ones have size 1.
  struct Axis {
    int64_t x = 1, k = 1, y = 1, stride = 1, low = 0, x_dilation = 1, k_dilation = 1;
  } a[3];
  const size_t n = xd.size() - 2;
  for (size_t i = 0; i < n; ++i)
    a[i] = {xd[i + 1], wd[i + 2], yd[i + 1], o.stride[i], o.pad_low[i], o.lhs_dilation[i], o.rhs_dilation[i]};
  const int64_t channels = xd.back(), out = wd[0], per_group = wd[1];
  Doubles y;
  for (int64_t b = 0; b < xd[0]; ++b)
    for (int64_t i = 0; i < a[0].y; ++i)
      for (int64_t j = 0; j < a[1].y; ++j)
        for (int64_t k = 0; k < a[2].y; ++k)
          for (int64_t c = 0; c < out; ++c) {
            double sum = 0;
            for (int64_t p = 0; p < a[0].k; ++p)
              for (int64_t q = 0; q < a[1].k; ++q)
                for (int64_t r = 0; r < a[2].k; ++r) {
                  const int64_t place[] = {i, j, k}, tap[] = {p, q, r};
                  int64_t at[3];
                  bool inside = true;
                  for (int d = 0; d < 3; ++d) {
                    at[d] = place[d] * a[d].stride + tap[d] * a[d].k_dilation - a[d].low;
                    inside = inside && at[d] >= 0 && at[d] % a[d].x_dilation == 0 && at[d] / a[d].x_dilation < a[d].x;
                    at[d] /= a[d].x_dilation;
                  }
                  if (!inside) continue;
                  for (int64_t e = 0; e < per_group; ++e) {
                    int64_t from = c / (out / o.groups) * per_group + e;
                    size_t xi = static_cast<size_t>(
                        (((b * a[0].x + at[0]) * a[1].x + at[1]) * a[2].x + at[2]) * channels + from);
                    size_t wi = static_cast<size_t>((((c * per_group + e) * a[0].k + p) * a[1].k + q) * a[2].k + r);
                    sum += x[xi] * w[wi];
                  }
                }
            y.push_back(sum);
          }
  return y;
}

TEST(Conv, AgreesWithLoopsInOneToThreeDimensions) {
  struct Case {
    const char* name;
    Dims x, w, y;
    ConvOptions o;
  };
  const Case cases[] = {
      {"plain",
       {2, 5, 6, 3},
       {4, 3, 3, 3},
       {2, 5, 6, 4},
       {.stride = {1, 1}, .pad_low = {1, 1}, .pad_high = {1, 1}, .lhs_dilation = {1, 1}, .rhs_dilation = {1, 1}}},
      {"line",
       {2, 9, 3},
       {4, 3, 3},
       {2, 4, 4},
       {.stride = {2}, .pad_low = {1}, .pad_high = {0}, .lhs_dilation = {1}, .rhs_dilation = {1}}},
      {"pointwise",
       {2, 3, 4, 3},
       {5, 3, 1, 1},
       {2, 3, 4, 5},
       {.stride = {1, 1}, .pad_low = {0, 0}, .pad_high = {0, 0}, .lhs_dilation = {1, 1}, .rhs_dilation = {1, 1}}},
      {"uneven pads",
       {1, 8, 8, 2},
       {3, 2, 3, 3},
       {1, 4, 4, 3},
       {.stride = {2, 2}, .pad_low = {0, 0}, .pad_high = {1, 1}, .lhs_dilation = {1, 1}, .rhs_dilation = {1, 1}}},
      {"groups and dilation",
       {1, 7, 8, 4},
       {6, 2, 2, 3},
       {1, 6, 8, 6},
       {.stride = {1, 1},
        .pad_low = {1, 2},
        .pad_high = {0, 2},
        .lhs_dilation = {1, 1},
        .rhs_dilation = {2, 2},
        .groups = 2}},
      {"depthwise",
       {1, 5, 5, 3},
       {3, 1, 3, 3},
       {1, 5, 5, 3},
       {.stride = {1, 1},
        .pad_low = {1, 1},
        .pad_high = {1, 1},
        .lhs_dilation = {1, 1},
        .rhs_dilation = {1, 1},
        .groups = 3}},
      {"transposed",
       {1, 3, 4, 2},
       {3, 2, 3, 3},
       {1, 6, 8, 3},
       {.stride = {1, 1}, .pad_low = {1, 1}, .pad_high = {2, 2}, .lhs_dilation = {2, 2}, .rhs_dilation = {1, 1}}},
      {"cropped",
       {1, 6, 6, 2},
       {2, 2, 3, 3},
       {1, 3, 3, 2},
       {.stride = {1, 1}, .pad_low = {-1, 0}, .pad_high = {0, -1}, .lhs_dilation = {1, 1}, .rhs_dilation = {1, 1}}},
      {"volume, causal",
       {1, 3, 4, 5, 2},
       {3, 2, 3, 2, 3},
       {1, 3, 3, 3, 3},
       {.stride = {1, 1, 2},
        .pad_low = {2, 0, 1},
        .pad_high = {0, 0, 1},
        .lhs_dilation = {1, 1, 1},
        .rhs_dilation = {1, 1, 1}}},
  };
  for (const Case& c : cases) {
    auto x = random_values(c.x, 1), w = random_values(c.w, 2);
    auto out = evaluate({array(DType::f64, c.x, x), array(DType::f64, c.w, w)},
                        [&](Graph&, const Tensors& in) { return Tensors{conv(in[0], in[1], c.o)}; });
    ASSERT_EQ(out[0].dims(), c.y) << c.name;
    expect_near(out[0], naive_conv(x, c.x, w, c.w, c.o, c.y), 1e-12, c.name);
  }
}

TEST(Conv, OptionsMayBeLeftOut) {
  auto x = random_values({1, 4, 4, 2}, 1), w = random_values({3, 2, 3, 3}, 2);
  auto out = evaluate({array(DType::f64, {1, 4, 4, 2}, x), array(DType::f64, {3, 2, 3, 3}, w)},
                      [&](Graph&, const Tensors& in) { return Tensors{conv(in[0], in[1])}; });
  ConvOptions full{
      .stride = {1, 1}, .pad_low = {0, 0}, .pad_high = {0, 0}, .lhs_dilation = {1, 1}, .rhs_dilation = {1, 1}};
  expect_near(out[0], naive_conv(x, {1, 4, 4, 2}, w, {3, 2, 3, 3}, full, {1, 2, 2, 3}), 1e-12);
}

TEST(Conv, SecondDerivativesExist) {
  Dims xd = {1, 4, 4, 2}, wd = {2, 2, 3, 3};
  auto x = random_values(xd, 3), w = random_values(wd, 4);
  // L = Σ(∂/∂w Σ conv(x, w)²)² has a gradient in x only through the gradients' own gradients.
  auto loss = [](Tensor x, Tensor w) {
    return sum(square(grad(sum(square(conv(x, w, {.pad_low = {1, 1}, .pad_high = {1, 1}}))), {w})[0]));
  };
  auto value = [&](const Doubles& x) {
    return evaluate({array(DType::f64, xd, x), array(DType::f64, wd, w)},
                    [&](Graph&, const Tensors& in) { return Tensors{loss(in[0], in[1])}; })[0]
        .to_doubles()[0];
  };
  auto g = evaluate({array(DType::f64, xd, x), array(DType::f64, wd, w)},
                    [&](Graph&, const Tensors& in) { return grad(loss(in[0], in[1]), {in[0]}); })[0]
               .to_doubles();
  for (size_t i : {0u, 7u, 31u}) {
    auto up = x, down = x;
    up[i] += 1e-5, down[i] -= 1e-5;
    EXPECT_NEAR((value(up) - value(down)) / 2e-5, g[i], 1e-5 * std::abs(g[i]) + 1e-4);
  }
}

TEST(Dot, BatchAndSeveralContractedAxesAgreeWithLoops) {
  // y[b, i, j] = Σ_{k,l} a[k, b, i, l] · c[j, l, b, k]
  constexpr int64_t B = 2, I = 3, J = 4, K = 5, L = 2;
  auto a = random_values({K, B, I, L}, 1), c = random_values({J, L, B, K}, 2);
  auto out =
      evaluate({array(DType::f64, {K, B, I, L}, a), array(DType::f64, {J, L, B, K}, c)}, [](Graph&, const Tensors& in) {
        return Tensors{
            dot(in[0], in[1], {.lhs_contract = {0, -1}, .rhs_contract = {3, 1}, .lhs_batch = {1}, .rhs_batch = {-2}})};
      });
  Doubles y;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < I; ++i)
      for (int64_t j = 0; j < J; ++j) {
        double s = 0;
        for (int64_t k = 0; k < K; ++k)
          for (int64_t l = 0; l < L; ++l)
            s += a[static_cast<size_t>(((k * B + b) * I + i) * L + l)] *
                 c[static_cast<size_t>(((j * L + l) * B + b) * K + k)];
        y.push_back(s);
      }
  expect_near(out[0], y, 1e-13);
}

TEST(Dot, AccumulatesInTheRequestedType) {
  // 1 + 4096 · 2⁻¹⁰: every partial sum above 4 is lost in bf16, none in f32.
  Doubles row(4097, 0x1p-10);
  row[0] = 1;
  auto out = evaluate({array(DType::bf16, {1, 4097}, row), array(DType::bf16, {4097, 1}, Doubles(4097, 1))},
                      [](Graph&, const Tensors& in) {
                        return Tensors{dot(in[0], in[1], {.lhs_contract = {1}, .rhs_contract = {0}}, DType::f32),
                                       cast(matmul(in[0], in[1]), DType::f32)};
                      });
  EXPECT_EQ(out[0].to_doubles()[0], 5);
  EXPECT_EQ(out[1].to_doubles()[0], 5);
}

TEST(Dot, GradientOfAWideProductComesBackNarrow) {
  Graph g;
  Tensor a = g.input("a", {DType::bf16, {2, 3}}), b = g.input("b", {DType::bf16, {4, 3}});
  auto grads = grad(sum(dot(a, b, {.lhs_contract = {1}, .rhs_contract = {1}}, DType::f32)), {a, b});
  EXPECT_EQ(to_string(grads[0].shape()), "bf16[2,3]");
  EXPECT_EQ(to_string(grads[1].shape()), "bf16[4,3]");
}

TEST(Dot, GradientsOfALinearLayerNeedNoTranspose) {
  Graph g;
  Tensor x = g.input("x", {DType::f32, {2, 7, 3}}), w = g.input("w", {DType::f32, {4, 3}});
  auto grads = grad(sum(square(dot(x, w, {.lhs_contract = {-1}, .rhs_contract = {1}}))), {x, w});
  g.output("dx", grads[0]);
  g.output("dw", grads[1]);
  EXPECT_EQ(to_stablehlo(g).find("transpose"), std::string::npos);
}

TEST(Sum, NarrowFloatsAccumulateInF32) {
  Doubles ones(3000, 1);
  for (DType t : {DType::bf16, DType::f16}) {
    auto out = evaluate({array(t, {3000}, ones)}, [](Graph&, const Tensors& in) {
      return Tensors{sum(in[0]), mean(in[0]), cumsum(in[0], 0)};
    });
    EXPECT_EQ(out[0].dtype(), t);
    EXPECT_NEAR(out[0].to_doubles()[0], 3000, 8);  // a bf16 sum would stop at 256
    EXPECT_EQ(out[1].to_doubles()[0], 1);
    EXPECT_NEAR(out[2].to_doubles()[2999], 3000, 8);
  }
}

TEST(Reductions, KeepAxesAndAllAxes) {
  auto out = evaluate({array(DType::f32, {2, 3}, {1, 5, 3, -4, 2, 0}), array(DType::s32, {3}, {-5, -2, -9})},
                      [](Graph&, const Tensors& in) {
                        return Tensors{sum(in[0], {-1}, true),
                                       max(in[0], {0}),
                                       min(in[0]),
                                       max(in[1]),
                                       min(in[1]),
                                       all(gt(in[0], full_like(in[0], 0)), {1}),
                                       any(lt(in[0], full_like(in[0], 0)), {1})};
                      });
  EXPECT_EQ(out[0].dims(), (Dims{2, 1}));
  EXPECT_EQ(out[0].to_doubles(), (Doubles{9, -2}));
  EXPECT_EQ(out[1].to_doubles(), (Doubles{1, 5, 3}));
  EXPECT_EQ(out[2].to_doubles(), (Doubles{-4}));
  EXPECT_EQ(out[3].to_doubles(), (Doubles{-2}));
  EXPECT_EQ(out[4].to_doubles(), (Doubles{-9}));
  EXPECT_EQ(out[5].to_doubles(), (Doubles{1, 0}));
  EXPECT_EQ(out[6].to_doubles(), (Doubles{0, 1}));
}

TEST(Argmax, FirstOnTiesAndNaNWins) {
  auto out = evaluate({array(DType::f32, {3, 4}, {1, 7, 7, 2, -1, -3, -1, -2, 0, kNan, 9, kNan})},
                      [](Graph&, const Tensors& in) { return Tensors{argmax(in[0], -1)}; });
  EXPECT_EQ(out[0].dtype(), DType::s32);
  EXPECT_EQ(out[0].to_doubles(), (Doubles{1, 0, 1}));
}

TEST(Softmax, IsStableAndComputedInF32) {
  auto out = evaluate(
      {array(DType::f32, {2, 3}, {1000, 1001, 999, -1e30, 0, 0}), array(DType::bf16, {3}, {1, 2, 3})},
      [](Graph&, const Tensors& in) {
        return Tensors{softmax(in[0]), softmax(in[1]), logsumexp(in[0], 1), logsumexp(full_like(in[0], -INFINITY), 1)};
      });
  double s = std::exp(-1.0) + 1 + std::exp(-2.0);
  expect_near(out[0], {std::exp(-1.0) / s, 1 / s, std::exp(-2.0) / s, 0, 0.5, 0.5}, 1e-7);
  expect_near(out[1], {0.0900306, 0.244728, 0.665241}, 2e-3);
  expect_near(out[2], {1001 + std::log(s), std::log(2.0)}, 1e-4);
  EXPECT_EQ(out[3].to_doubles()[0], -INFINITY);
}

TEST(Cumsum, RunsAlongItsAxis) {
  auto out = evaluate({array(DType::s32, {2, 3}, {1, 2, 3, 4, 5, 6})}, [](Graph&, const Tensors& in) {
    return Tensors{cumsum(in[0], 1), cumsum(in[0], 0)};
  });
  EXPECT_EQ(out[0].to_doubles(), (Doubles{1, 3, 6, 4, 9, 15}));
  EXPECT_EQ(out[1].to_doubles(), (Doubles{1, 2, 3, 5, 7, 9}));
}

TEST(Sort, IsStableBothWaysAndCarriesValues) {
  auto out = evaluate({array(DType::s32, {6}, {3, 1, 3, 2, 1, 3}), array(DType::f32, {6}, {0, 1, 2, 3, 4, 5})},
                      [](Graph&, const Tensors& in) {
                        auto up = sort(in[0], {in[1]}, 0), down = sort(in[0], {in[1]}, 0, true);
                        return Tensors{up[0], up[1], down[0], down[1]};
                      });
  EXPECT_EQ(out[0].to_doubles(), (Doubles{1, 1, 2, 3, 3, 3}));
  EXPECT_EQ(out[1].to_doubles(), (Doubles{1, 4, 3, 0, 2, 5}));
  EXPECT_EQ(out[2].to_doubles(), (Doubles{3, 3, 3, 2, 1, 1}));
  EXPECT_EQ(out[3].to_doubles(), (Doubles{0, 2, 5, 3, 1, 4}));
}

TEST(SumOfSquares, IsOneF32NumberOverAllTensors) {
  auto out = evaluate({array(DType::bf16, {2}, {3, 4}), array(DType::f32, {1}, {12})},
                      [](Graph&, const Tensors& in) { return Tensors{sum_of_squares(in)}; });
  EXPECT_EQ(out[0].dtype(), DType::f32);
  EXPECT_EQ(out[0].to_doubles(), (Doubles{169}));
}

TEST(Take, ClampsIndicesAndItsGradientAddsThem) {
  auto out = evaluate({array(DType::f64, {3, 2}, {1, 2, 3, 4, 5, 6}), array(DType::s32, {2, 2}, {0, 2, -7, 9})},
                      [](Graph&, const Tensors& in) {
                        Tensor y = take(in[0], in[1]);
                        return Tensors{y, grad(sum(y), {in[0]})[0], scatter_add(y, in[1], 3)};
                      });
  EXPECT_EQ(out[0].dims(), (Dims{2, 2, 2}));
  EXPECT_EQ(out[0].to_doubles(), (Doubles{1, 2, 5, 6, 1, 2, 5, 6}));
  EXPECT_EQ(out[1].to_doubles(), (Doubles{2, 2, 0, 0, 2, 2}));
  EXPECT_EQ(out[2].to_doubles(), (Doubles{2, 4, 0, 0, 10, 12}));
}

TEST(TakePerBatch, OneRowEachClamped) {
  auto out = evaluate(
      {array(DType::f64, {3, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}), array(DType::s32, {3}, {1, -3, 8})},
      [](Graph&, const Tensors& in) {
        Tensor y = take_per_batch(in[0], in[1]);
        return Tensors{y, grad(sum(y), {in[0]})[0]};
      });
  EXPECT_EQ(out[0].to_doubles(), (Doubles{3, 4, 5, 6, 11, 12}));
  EXPECT_EQ(out[1].to_doubles(), (Doubles{0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1}));
}

TEST(Shapes, MoveElementsWhereTheySay) {
  auto out = evaluate({array(DType::s32, {2, 3}, {1, 2, 3, 4, 5, 6}), array(DType::s32, {}, {1})},
                      [](Graph&, const Tensors& in) {
                        Tensor x = in[0];
                        return Tensors{transpose(x, {-1, 0}),
                                       reshape(x, {3, -1}),
                                       stack({x, x}, 1),
                                       slice_axis(x, -1, 1, -1),
                                       reverse(x, {1}),
                                       pad(x, 9, {0, -1}, {1, 0}, {0, 1}),
                                       dynamic_index(x, in[1]),
                                       split(x, 3, 1)[2],
                                       flatten(x),
                                       dynamic_update_slice(x, slice(x, {0, 0}, {1, 2}), {in[1], in[1]}),
                                       squeeze(expand_dims(x, -1), 2)};
                      });
  EXPECT_EQ(out[0].to_doubles(), (Doubles{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(out[1].dims(), (Dims{3, 2}));
  EXPECT_EQ(out[2].dims(), (Dims{2, 2, 3}));
  EXPECT_EQ(out[2].to_doubles(), (Doubles{1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6}));
  EXPECT_EQ(out[3].to_doubles(), (Doubles{2, 5}));
  EXPECT_EQ(out[4].to_doubles(), (Doubles{3, 2, 1, 6, 5, 4}));
  EXPECT_EQ(out[5].to_doubles(), (Doubles{9, 2, 9, 3, 9, 5, 9, 6, 9, 9, 9, 9}));
  EXPECT_EQ(out[6].to_doubles(), (Doubles{4, 5, 6}));
  EXPECT_EQ(out[7].to_doubles(), (Doubles{3, 6}));
  EXPECT_EQ(out[8].dims(), (Dims{6}));
  EXPECT_EQ(out[9].to_doubles(), (Doubles{1, 2, 3, 4, 1, 2}));
  EXPECT_EQ(out[10].dims(), (Dims{2, 3}));
}

TEST(CustomCall, PrintsItsTargetAndConfiguration) {
  Graph g;
  Tensor x = g.input("x", {DType::f32, {2}});
  auto y = custom_call(
      g, {x}, {.target = "md.kernel", .results = {x.shape(), {DType::s32, {}}}, .backend_config = "scale = 1.0 : f32"});
  ASSERT_EQ(y.size(), 2u);
  g.output("y", y[0]);
  std::string text = to_stablehlo(g);
  for (const char* part :
       {"\"stablehlo.custom_call\"(%arg0)", "call_target_name = \"md.kernel\"", "api_version = 4 : i32",
        "backend_config = {scale = 1.0 : f32}", "-> (tensor<2xf32>, tensor<i32>)"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

}  // namespace
}  // namespace md
