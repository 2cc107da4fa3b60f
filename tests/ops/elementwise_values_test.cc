// Elementwise functions compared with the C++ library: f64 to many digits, f32 within a few ulps of the exact value,
// because parity with other frameworks depends on them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/ops/evaluate.h"

namespace md {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

struct Function {
  const char* name;
  Tensor (*graph)(Tensor);
  double (*exact)(double);
  double low, high;
  double ulps = 4;  // for f32, relative to the larger of |value| and `floor`
  double floor = 0;
};

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

const Function kFunctions[] = {
    {"exp", exp, std::exp, -80, 80, 4},
    {"expm1", expm1, std::expm1, -5, 5, 8},
    {"log", log, std::log, 1e-6, 100, 4},
    {"log1p", log1p, std::log1p, -0.9, 50, 8},
    {"sqrt", sqrt, std::sqrt, 0, 100, 1},
    {"rsqrt", rsqrt, [](double x) { return 1 / std::sqrt(x); }, 1e-3, 100, 4},
    {"sin", sin, std::sin, -50, 50, 4, 0.1},
    {"cos", cos, std::cos, -50, 50, 4, 0.1},
    {"tanh", tanh, std::tanh, -10, 10, 8},
    {"sigmoid", sigmoid, logistic, -20, 20, 8},
    {"erf", erf, std::erf, -4, 4, 8},
    {"floor", floor, std::floor, -5, 5, 0},
    {"ceil", ceil, std::ceil, -5, 5, 0},
    {"round", round, std::nearbyint, -5, 5, 0},
    {"abs", abs, std::fabs, -5, 5, 0},
    {"relu", relu, [](double x) { return x > 0 ? x : 0; }, -5, 5, 0},
    {"silu", silu, [](double x) { return x * logistic(x); }, -8, 8, 8},
    // x·(1 + erf)/2 cancels if erf is near −1, so far below zero only the absolute error is small.
    {"gelu", gelu, [](double x) { return x * (1 + std::erf(x / std::sqrt(2.0))) / 2; }, -6, 6, 8, 1},
    {"gelu_tanh", gelu_tanh,
     [](double x) { return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }, -6, 6, 8, 1},
    {"quick_gelu", quick_gelu, [](double x) { return x * logistic(1.702 * x); }, -6, 6, 8},
};

TEST(Functions, AgreeWithTheCLibrary) {
  constexpr int64_t n = 4001;
  std::vector<HostArray> inputs;
  for (DType type : {DType::f64, DType::f32})
    for (const Function& f : kFunctions) {
      std::vector<double> x(n);
      for (int64_t i = 0; i < n; ++i)
        x[static_cast<size_t>(i)] = f.low + (f.high - f.low) * static_cast<double>(i) / (n - 1);
      inputs.push_back(array(type, {n}, x));
    }
  const size_t count = std::size(kFunctions);
  auto out = evaluate(inputs, [&](Graph&, const std::vector<Tensor>& in) {
    std::vector<Tensor> y;
    for (size_t i = 0; i < in.size(); ++i) y.push_back(kFunctions[i % count].graph(in[i]));
    return y;
  });
  for (size_t i = 0; i < out.size(); ++i) {
    const Function& f = kFunctions[i % count];
    const bool wide = i < count;
    auto x = inputs[i].to_doubles(), y = out[i].to_doubles();
    double worst = 0, where = 0;
    for (size_t e = 0; e < x.size(); ++e) {
      double exact = f.exact(x[e]);
      double unit = (wide ? 0x1p-52 : 0x1p-23) * std::max({std::abs(exact), f.floor, wide ? 1e-300 : 1e-30});
      double error = std::abs(y[e] - exact) / unit;
      if (!(error <= worst)) worst = error, where = x[e];
    }
    // f64 is only used for gradient checks: a thousand ulps still leave twelve digits.
    EXPECT_LE(worst, wide ? std::max(f.ulps, 1.0) * 256 : f.ulps)
        << f.name << (wide ? " f64" : " f32") << " at " << where;
    if (std::getenv("MD_PRINT_ULPS")) printf("%-12s %s %.2f ulp at %g\n", f.name, wide ? "f64" : "f32", worst, where);
  }
}

TEST(ErfInv, InvertsErf) {
  std::vector<double> x;
  for (double v = -0.9999; v < 1; v += 0.0113) x.push_back(v);
  auto out = evaluate(
      {array(DType::f64, {static_cast<int64_t>(x.size())}, x), array(DType::f32, {static_cast<int64_t>(x.size())}, x)},
      [](Graph&, const std::vector<Tensor>& in) {
        return std::vector<Tensor>{erf_inv(in[0]), erf_inv(in[1])};
      });
  auto wide = out[0].to_doubles(), narrow = out[1].to_doubles();
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_NEAR(std::erf(wide[i]), x[i], 1e-12);
    EXPECT_NEAR(narrow[i], wide[i], 2e-6 * std::max(1.0, std::abs(wide[i])) * (1 + std::exp(wide[i] * wide[i]) * 0.05));
  }
}

TEST(Binary, ValuesAndSpecialCases) {
  std::vector<double> a = {7, -7, 2, 0, 3, -1}, b = {3, 3, -2, 5, 3, 2};
  auto out =
      evaluate({array(DType::f32, {6}, a), array(DType::f32, {6}, b)}, [](Graph&, const std::vector<Tensor>& in) {
        Tensor x = in[0], y = in[1];
        return std::vector<Tensor>{x + y,         x - y,         x * y,       x / y,         rem(x, y),
                                   maximum(x, y), minimum(x, y), atan2(x, y), pow(abs(x), y)};
      });
  for (size_t i = 0; i < a.size(); ++i) {
    double exact[] = {a[i] + b[i],
                      a[i] - b[i],
                      a[i] * b[i],
                      a[i] / b[i],
                      std::fmod(a[i], b[i]),
                      std::max(a[i], b[i]),
                      std::min(a[i], b[i]),
                      std::atan2(a[i], b[i]),
                      std::pow(std::abs(a[i]), b[i])};
    for (size_t k = 0; k < out.size(); ++k)
      EXPECT_NEAR(out[k].to_doubles()[i], exact[k], 1e-5 * std::abs(exact[k])) << k;
  }
}

TEST(Integers, BitsShiftsAndComparison) {
  std::vector<double> a = {0, 5, 255, 4294967295.0}, b = {1, 3, 8, 31};
  auto out =
      evaluate({array(DType::u32, {4}, a), array(DType::u32, {4}, b)}, [](Graph&, const std::vector<Tensor>& in) {
        Tensor x = in[0], y = in[1];
        return std::vector<Tensor>{bit_and(x, y), bit_or(x, y),     bit_xor(x, y),
                                   bit_not(x),    shift_left(x, y), shift_right_logical(x, y),
                                   gt(x, y),      x / 2.0,          x * 3.0};
      });
  for (size_t i = 0; i < a.size(); ++i) {
    auto x = static_cast<uint32_t>(a[i]), y = static_cast<uint32_t>(b[i]);
    uint32_t exact[] = {x & y, x | y, x ^ y, ~x, x << y, x >> y, x > y, x / 2, x * 3};
    for (size_t k = 0; k < out.size(); ++k) EXPECT_EQ(out[k].to_doubles()[i], exact[k]) << k;
  }
}

TEST(Broadcasting, FollowsNumPyInBothDirections) {
  auto out =
      evaluate({array(DType::f32, {2, 1}, {10, 20}), array(DType::f32, {3}, {1, 2, 3}), array(DType::f32, {}, {100})},
               [](Graph&, const std::vector<Tensor>& in) {
                 return std::vector<Tensor>{in[0] + in[1], in[2] - in[0], where(gt(in[1], in[0] / 10.0), in[0], in[2])};
               });
  EXPECT_EQ(out[0].dims(), (Dims{2, 3}));
  EXPECT_EQ(out[0].to_doubles(), (std::vector<double>{11, 12, 13, 21, 22, 23}));
  EXPECT_EQ(out[1].dims(), (Dims{2, 1}));
  EXPECT_EQ(out[1].to_doubles(), (std::vector<double>{90, 80}));
  EXPECT_EQ(out[2].to_doubles(), (std::vector<double>{100, 10, 10, 100, 100, 20}));
}

TEST(Broadcasting, ErrorNamesBothShapesAndThePath) {
  Graph g;
  Tensor a = g.input("a", {DType::f32, {2, 3}}), b = g.input("b", {DType::f32, {4}}),
         c = g.input("c", {DType::bf16, {2, 3}});
  PathScope scope(g, "unet.down.0");
  auto message = [](auto&& act) -> std::string {
    try {
      act();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([&] { a + b; }), "add: shapes do not broadcast: f32[2,3] and f32[4]\n  at unet.down.0");
  EXPECT_EQ(message([&] { a* c; }),
            "multiply: element types differ: f32[2,3] and bf16[2,3]; cast one of them\n  at unet.down.0");
}

TEST(Ties, GradientIsSplitEvenly) {
  auto out = evaluate(
      {array(DType::f64, {3}, {1, 2, 3}), array(DType::f64, {3}, {3, 2, 1})},
      [](Graph&, const std::vector<Tensor>& in) {
        auto g = grad(sum(maximum(in[0], in[1])), in);
        auto m = grad(sum(minimum(in[0], in[1])), in);
        return std::vector<Tensor>{
            g[0], g[1], m[0], m[1], grad(max(in[0] * 0.0), {in[0]})[0], grad(sum(relu(in[0] - in[1])), {in[0]})[0]};
      });
  EXPECT_EQ(out[0].to_doubles(), (std::vector<double>{0, 0.5, 1}));
  EXPECT_EQ(out[1].to_doubles(), (std::vector<double>{1, 0.5, 0}));
  EXPECT_EQ(out[2].to_doubles(), (std::vector<double>{1, 0.5, 0}));
  EXPECT_EQ(out[3].to_doubles(), (std::vector<double>{0, 0.5, 1}));
  EXPECT_EQ(out[5].to_doubles(), (std::vector<double>{0, 0, 1}));  // 0 at 0, as in PyTorch
}

TEST(Ties, MaxSharesAmongAllOfThem) {
  auto out = evaluate({array(DType::f64, {4}, {5, 1, 5, 5})},
                      [](Graph&, const std::vector<Tensor>& in) { return grad(max(in[0]), in); });
  EXPECT_EQ(out[0].to_doubles(), (std::vector<double>{1.0 / 3, 0, 1.0 / 3, 1.0 / 3}));
}

TEST(Power, GradientsAtTheEdgesAreFinite) {
  auto out = evaluate({array(DType::f64, {3}, {0, 0, 2}), array(DType::f64, {3}, {0, 2, 0})},
                      [](Graph&, const std::vector<Tensor>& in) { return grad(sum(pow(in[0], in[1])), in); });
  EXPECT_EQ(out[0].to_doubles(), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(out[1].to_doubles()[0], 0);
  EXPECT_EQ(out[1].to_doubles()[1], 0);
  EXPECT_NEAR(out[1].to_doubles()[2], std::log(2.0), 1e-15);
}

class FloatType : public testing::TestWithParam<DType> {};

TEST_P(FloatType, NonFiniteConstantsSurvivePrinting) {
  DType t = GetParam();
  auto out = evaluate({}, [&](Graph& g, const std::vector<Tensor>&) {
    std::vector<Tensor> all;
    // f8e4m3fn has no infinity.
    const double infinity = t == DType::f8e4m3fn ? 448 : kInfinity;
    for (double v : {kNan, infinity, -infinity, 0.5, -0.0}) all.push_back(cast(full(g, v, {t, {2}}), DType::f64));
    return all;
  });
  EXPECT_TRUE(std::isnan(out[0].to_doubles()[0]));
  EXPECT_EQ(out[1].to_doubles()[1], t == DType::f8e4m3fn ? 448 : kInfinity);
  EXPECT_EQ(out[2].to_doubles()[0], t == DType::f8e4m3fn ? -448 : -kInfinity);
  EXPECT_EQ(out[3].to_doubles()[0], 0.5);
  EXPECT_TRUE(std::signbit(out[4].to_doubles()[0]));
}

INSTANTIATE_TEST_SUITE_P(All, FloatType,
                         testing::Values(DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8e5m2,
                                         DType::f8e4m3fn),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(Constants, IntegersOfEveryTypeKeepTheirExtremes) {
  struct Case {
    DType type;
    double value;
  };
  const Case cases[] = {
      {DType::s8, -128}, {DType::s16, -32768}, {DType::s32, -2147483648.0}, {DType::s64, -9007199254740992.0},
      {DType::u8, 255},  {DType::u16, 65535},  {DType::u32, 4294967295.0},  {DType::u64, 9007199254740992.0},
      {DType::pred, 1}};
  auto out = evaluate({}, [&](Graph& g, const std::vector<Tensor>&) {
    std::vector<Tensor> all;
    for (const Case& c : cases) all.push_back(full(g, c.value, {c.type, {2}}));
    return all;
  });
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i].to_doubles()[1], cases[i].value) << to_string(cases[i].type);
}

TEST(Constants, TablesKeepEveryElementOfEveryType) {
  for (DType t : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::s8, DType::s32, DType::s64, DType::u16,
                  DType::u32, DType::pred}) {
    std::vector<double> values = {0, 1, 1, 0, 0, 1};
    if (t != DType::pred) values = {0, 1, 2, 3, 100, 77};
    auto table = array(t, {2, 3}, values);
    auto out = evaluate({}, [&](Graph& g, const std::vector<Tensor>&) {
      return std::vector<Tensor>{constant(g, table), constant(g, table.reshaped({6})),
                                 constant(g, array(t, {1, 1}, {1}))};
    });
    EXPECT_EQ(out[0].to_doubles(), values) << to_string(t);
    EXPECT_EQ(out[1].to_doubles(), values) << to_string(t);
    EXPECT_EQ(out[2].to_doubles(), (std::vector<double>{1})) << to_string(t);
  }
}

TEST(Constants, NumberWithATensorPrintsOneSplat) {
  Graph g;
  Tensor x = g.input("x", {DType::f32, {2, 3}});
  g.output("y", (x * 2.0 + 1.0) * 2.0);
  std::string text = to_stablehlo(g);
  EXPECT_EQ(text.find("broadcast_in_dim"), std::string::npos) << text;
  size_t constants = 0;
  for (size_t at = 0; (at = text.find("stablehlo.constant", at)) != std::string::npos; ++at) ++constants;
  EXPECT_EQ(constants, 2u) << text;  // 2 is emitted once for both uses
}

TEST(Casting, RoundsToNearestEvenAndKeepsBits) {
  auto out = evaluate({array(DType::f32, {4}, {1.00390625, 1.01171875, -3.7, 70000})},
                      [](Graph&, const std::vector<Tensor>& in) {
                        return std::vector<Tensor>{cast(in[0], DType::bf16), cast(in[0], DType::s32),
                                                   bitcast(in[0], DType::u32), cast(in[0], DType::f16)};
                      });
  EXPECT_EQ(out[0].to_doubles(), (std::vector<double>{1.0, 1.015625, -3.703125, 70144}));
  EXPECT_EQ(out[1].to_doubles(), (std::vector<double>{1, 1, -3, 70000}));
  EXPECT_EQ(out[2].to_doubles()[0], 0x3F808000);
  EXPECT_EQ(out[3].to_doubles()[3], kInfinity);
}

TEST(Clamp, PassesTheGradientAtItsBounds) {
  auto out = evaluate({array(DType::f64, {5}, {-2, -1, 0, 1, 2})}, [](Graph&, const std::vector<Tensor>& in) {
    Tensor y = clamp(in[0], -1, 1);
    return std::vector<Tensor>{y, grad(sum(y), in)[0]};
  });
  EXPECT_EQ(out[0].to_doubles(), (std::vector<double>{-1, -1, 0, 1, 1}));
  EXPECT_EQ(out[1].to_doubles(), (std::vector<double>{0, 1, 1, 1, 0}));
}

TEST(StopGradient, CutsAndNamedMarks) {
  Graph g;
  Tensor x = g.input("x", {DType::f32, {2}});
  Tensor y = named(x * 2.0, "middle");
  EXPECT_EQ(y.node()->name, "middle");
  EXPECT_FALSE(grad(sum(stop_gradient(y)), {x})[0]);
  EXPECT_TRUE(static_cast<bool>(grad(sum(y), {x})[0]));
}

}  // namespace
}  // namespace md
