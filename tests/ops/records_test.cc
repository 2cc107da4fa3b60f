// Tests every operation: the shapes it infers must equal the compiler's, and its gradient must equal finite differences
// in f64. New operations are tested automatically; those without samples must be listed below with the test that covers
// them.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/op_samples.h"
#include "tests/ops/evaluate.h"

namespace md {
namespace {

/// Operations that cannot be tested with arguments alone, and their tests.
const std::map<std::string, std::string> kTestedElsewhere = {
    {"scan", "needs a traced body; tests/autodiff/scan_test.cc"},
    {"if", "needs a traced body; tests/autodiff/scan_test.cc"},
    {"custom_call", "needs a handler in the plugin; its text is checked in arrays_values_test.cc"},
    {"attention", "a call of a kernel, which has no f64; tests/kernels/attention_test.cc"},
    {"attention_grad", "a call of a kernel, which has no f64; tests/kernels/attention_test.cc"},
    {"cudnn_attention", "a call that needs a GPU; tests/autodiff/attention_cudnn_test.cc"},
    {"cudnn_attention_grad", "a call that needs a GPU; tests/autodiff/attention_cudnn_test.cc"},
    {"tile_program", "needs a kernel; tests/tiles/operations_test.cc"},
    {"custom_vjp", "its gradient is its caller's; tests/autodiff/grad_test.cc"},
    {"sharding_constraint", "needs a mesh; tests/autodiff/sharding_test.cc"},
    {"all_reduce", "needs a mesh; tests/autodiff/sharding_test.cc"},
    {"all_gather", "needs a mesh; tests/autodiff/sharding_test.cc"},
    {"reduce_scatter", "needs a mesh; tests/autodiff/sharding_test.cc"},
    {"collective_permute", "needs a mesh; tests/autodiff/sharding_test.cc"},
    {"all_to_all", "needs a mesh; tests/autodiff/sharding_test.cc"},
    {"axis_index", "needs a mesh; tests/autodiff/sharding_test.cc"},
    {"manual_computation", "needs a mesh; tests/autodiff/sharding_test.cc"},
};

std::vector<HostArray> run(const Program& program, const std::vector<HostArray>& inputs) {
  std::vector<Array> arrays;
  std::vector<Array*> pointers;
  for (const HostArray& a : inputs) arrays.push_back(one_device().put(a));
  for (Array& a : arrays) pointers.push_back(&a);
  std::vector<HostArray> out;
  for (Array& a : program.run(pointers)) out.push_back(one_device().get(a));
  return out;
}

/// The loss is Σ weightᵢ · outᵢ over the floating-point outputs with fixed random weights; gradients are compared along
/// random directions, so one number depends on every element.
void check_sample(const OpDef& op, const OpSample& sample, std::mt19937& random) {
  Graph g(one_device().graph_options());
  std::vector<Tensor> in, expected;
  std::vector<HostArray> values;
  std::vector<size_t> moved;
  for (size_t i = 0; i < sample.inputs.size(); ++i) {
    Shape shape = sample.inputs[i];
    if (is_float(shape.dtype)) shape.dtype = DType::f64;
    in.push_back(g.input("x" + std::to_string(i), shape));
    values.push_back(random_values(shape, sample.low, sample.high, random));
    bool wants = sample.differentiate.empty() ? is_float(shape.dtype) : sample.differentiate[i];
    if (!wants || op.vjp == no_gradient) continue;
    expected.push_back(in.back());
    moved.push_back(i);
  }
  std::vector<Tensor> out = apply_sample(op, g, in, sample.attributes);
  Tensor loss;
  std::vector<Shape> inferred;
  for (size_t i = 0; i < out.size(); ++i) {
    inferred.push_back(out[i].shape());
    g.output("y" + std::to_string(i), out[i]);
    if (!is_float(out[i].dtype()) || expected.empty()) continue;
    Tensor weight = constant(g, random_values({DType::f64, out[i].dims()}, 0.5, 1.5, random));
    Tensor term = sum(cast(out[i], DType::f64) * weight);
    loss = loss ? loss + term : term;
  }
  std::vector<size_t> with_gradient;  // positions in `moved`
  if (loss) {
    g.output("loss", loss);
    auto grads = grad(loss, expected);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i]) continue;
      ASSERT_EQ(to_string(grads[i].shape()), to_string(expected[i].shape()));
      g.output("g" + std::to_string(i), grads[i]);
      with_gradient.push_back(i);
    }
  }
  Program program = compile(one_device(), g, {.jax_cache_dir = "off"}, op.name);
  auto result = run(program, values);
  for (size_t i = 0; i < inferred.size(); ++i) {
    EXPECT_EQ(to_string(result[i].shape()), to_string(inferred[i])) << "output " << i;
    if (!is_float(inferred[i].dtype)) continue;
    bool any_nan = false;
    for (double v : result[i].to_doubles()) any_nan |= std::isnan(v);
    EXPECT_FALSE(any_nan) << "output " << i << " has NaN on its own samples";
  }
  if (!loss) return;

  const double h = 1e-5;
  for (int trial = 0; trial < 3; ++trial) {
    auto plus = values, minus = values;
    double predicted = 0, scale = 0;
    for (size_t k = 0, found = 0; k < moved.size(); ++k) {
      size_t i = moved[k];
      HostArray direction = random_values(values[i].shape(), -1, 1, random);
      auto d = direction.view<double>();
      plus[i] = HostArray(values[i].shape());
      minus[i] = HostArray(values[i].shape());
      for (size_t e = 0; e < d.size(); ++e) {
        plus[i].mutable_view<double>()[e] = values[i].view<double>()[e] + h * d[e];
        minus[i].mutable_view<double>()[e] = values[i].view<double>()[e] - h * d[e];
      }
      if (found >= with_gradient.size() || with_gradient[found] != k) continue;
      auto gradient = result[inferred.size() + 1 + found++].view<double>();
      for (size_t e = 0; e < d.size(); ++e) {
        predicted += gradient[e] * d[e];
        scale += std::abs(gradient[e] * d[e]);
      }
    }
    double up = run(program, plus)[inferred.size()].view<double>()[0];
    double down = run(program, minus)[inferred.size()].view<double>()[0];
    double measured = (up - down) / (2 * h);
    EXPECT_NEAR(measured, predicted, 1e-5 * std::max(scale, 1e-3)) << "direction " << trial;
  }
}

class Records : public testing::TestWithParam<const OpDef*> {};

TEST_P(Records, ShapesAndGradientsAreRight) {
  const OpDef& op = *GetParam();
  ASSERT_TRUE(op.samples != nullptr) << op.name << " has no samples and is not listed as tested elsewhere";
  std::mt19937 random(20240229);
  auto samples = op.samples();
  ASSERT_FALSE(samples.empty());
  for (size_t i = 0; i < samples.size(); ++i) {
    SCOPED_TRACE(fmt::format("{} sample {}", op.name, i));
    try {
      check_sample(op, samples[i], random);
    } catch (const Error& e) {
      ADD_FAILURE() << e.what();
    }
  }
}

std::vector<const OpDef*> tested_here() {
  std::vector<const OpDef*> out;
  for (const OpDef* op : all_ops())
    if (!kTestedElsewhere.contains(op->name)) out.push_back(op);
  return out;
}

INSTANTIATE_TEST_SUITE_P(All, Records, testing::ValuesIn(tested_here()),
                         [](const auto& info) { return std::to_string(info.index) + "_" + info.param->name; });

}  // namespace
}  // namespace md
