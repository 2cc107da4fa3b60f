// Layers compared with known values and plain host arithmetic.
#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

HostArray floats(Dims dims, const std::vector<float>& values) {
  return HostArray::of<float>({DType::f32, std::move(dims)}, values);
}

/// Runs f, which has one input and no parameters.
std::vector<double> run(const HostArray& x, const std::function<Tensor(Tensor)>& f) {
  Graph g(cpu().graph_options());
  g.output("y", f(g.input("x", x.shape())));
  return evaluate(cpu(), g, {x})[0].to_doubles();
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << "element " << i;
}

TEST(TimestepEmbedding, GivesTheKnownNumbers) {
  const std::vector<double> c = {-0.883849, 0.964965, 0.283662, 0.877583};
  const std::vector<double> s = {-0.467772, -0.262379, -0.958924, 0.479426};
  auto embed = [](bool flip, int64_t dim) {
    return run(floats({1}, {500}), [=](Tensor t) { return nn::timestep_embedding(t, dim, flip, 0); });
  };
  expect_near(embed(true, 8), {c[0], c[1], c[2], c[3], s[0], s[1], s[2], s[3]}, 1e-5);
  expect_near(embed(false, 8), {s[0], s[1], s[2], s[3], c[0], c[1], c[2], c[3]}, 1e-5);
  expect_near(embed(true, 9), {c[0], c[1], c[2], c[3], s[0], s[1], s[2], s[3], 0}, 1e-5);
}

TEST(Activation, GivesTheKnownNumbers) {
  auto at = [](const char* name) {
    return run(floats({3}, {-1, 0.5, 2}), [=](Tensor x) { return nn::activation(name, x); });
  };
  expect_near(at("gelu"), {-0.158655, 0.345731, 1.9545}, 1e-5);
  expect_near(at("gelu_new"), {-0.158808, 0.345714, 1.9546}, 1e-5);
  expect_near(at("quick_gelu"), {-0.154204, 0.350388, 1.93566}, 1e-5);
  expect_near(at("swish"), {-0.268941, 0.311230, 1.761594}, 1e-5);
  expect_near(at("mish"), {-0.303401, 0.375245, 1.943959}, 1e-5);
}

TEST(UpsampleNearest, RepeatsRowsAndColumns) {
  expect_near(run(floats({1, 1, 2, 2}, {1, 2, 3, 4}), nn::upsample_nearest),
              {1, 2, 1, 2, 3, 4, 3, 4, 1, 2, 1, 2, 3, 4, 3, 4}, 0);
}

/// y and dx of one layer with this weight and bias, for dy = the last input.
struct LayerRun {
  std::vector<double> y, dx;
};
LayerRun run_layer(const HostArray& x, const std::vector<float>& dy,
                   const std::function<Tensor(const Scope&, Tensor)>& f,
                   const std::map<std::string, std::vector<float>>& parameters) {
  Graph g(cpu().graph_options());
  ParamTable table;
  Tensor in = g.input("x", x.shape()), cotangent = g.input("dy", x.shape());
  Tensor y = f(Scope(g, table, "m"), in);
  g.output("y", y);
  g.output("dx", vjp({y}, {cotangent}, {in})[0]);
  std::vector<HostArray> arguments = {x, floats(x.dims(), dy)};
  for (const Param& p : table.params()) arguments.push_back(floats(p.shape.dims, parameters.at(p.path)));
  auto out = evaluate(cpu(), g, arguments);
  return {out[0].to_doubles(), out[1].to_doubles()};
}

TEST(RmsNorm, DividesByTheRootOfTheMeanSquare) {
  auto y = run_layer(floats({1, 2}, {3, 4}), {0, 0}, [](const Scope& s, Tensor x) { return nn::rms_norm(s, x, 0); },
                     {{"weight", {2, -1}}})
               .y;
  expect_near(y, {2 * 3 / std::sqrt(12.5), -4 / std::sqrt(12.5)}, 1e-6);
}

TEST(UnitNorm, DividesByTheNormAndLeavesZerosWhereTheyAre) {
  const auto run = run_layer(floats({2, 2}, {3, 4, 0, 0}), {1, 0, 0, 0},
                             [](const Scope& s, Tensor x) { return nn::unit_norm(s, x, 2); }, {{"gamma", {2, -1}}});
  const double root = std::sqrt(2);
  expect_near(run.y, {2 * root * 3 / 5, -root * 4 / 5, 0, 0}, 1e-6);
  expect_near(run.dx, {2 * root * (1 - 9.0 / 25) / 5, 2 * root * (-12.0 / 25) / 5, 0, 0}, 1e-6);
}

TEST(LayerNorm, WithoutParametersIsThatOfWeightOneAndBiasZero) {
  const HostArray x = floats({2, 3}, {0.5, -1, 2, 4, 4.5, 3});
  const std::vector<float> dy = {1, 2, -1, 0.5, 3, 0.25};
  auto plain = run_layer(x, dy, [](const Scope& s, Tensor t) { return nn::layer_norm(s, t, 1e-5, false); }, {});
  auto affine = run_layer(x, dy, [](const Scope& s, Tensor t) { return nn::layer_norm(s, t, 1e-5); },
                          {{"weight", {1, 1, 1}}, {"bias", {0, 0, 0}}});
  expect_near(plain.y, affine.y, 1e-6);
  expect_near(plain.dx, affine.dx, 1e-5);
}

TEST(GroupNorm, KeepsTheVarianceOfASignalWithALargeMean) {
  // 4096 ± 1: the mean of squares minus the squared mean would lose every digit in f32.
  const HostArray x = floats({1, 2, 2, 2}, {4097, 4097, 4095, 4095, 4097, 4097, 4095, 4095});
  auto y = run_layer(x, std::vector<float>(8, 0), [](const Scope& s, Tensor t) { return nn::group_norm(s, t, 1, 0); },
                     {{"weight", {1, 1}}, {"bias", {0, 0}}})
               .y;
  expect_near(y, {1, 1, -1, -1, 1, 1, -1, -1}, 1e-6);
}

}  // namespace
}  // namespace md
