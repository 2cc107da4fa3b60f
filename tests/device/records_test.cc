// Every operation, forward and gradient, on a device ($MD_TEST_HARDWARE) compared with this machine's CPU: the same
// inputs in the types of its samples. With the CPU as device, both are the same, and the test checks itself.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/registry.h"
#include "tests/device/host.h"
#include "tests/op_samples.h"

namespace md {
namespace {

// TPUs compute f32 products in bf16 (8 bits), GPUs with 10 bits; the samples sum few terms.
constexpr double kLargest = 2e-2;

struct Results {
  std::vector<HostArray> outputs, gradients;
};

/// The sample's outputs and the gradients of Σ weightᵢ · outᵢ over its floating-point outputs, on a device.
Results run(const Devices& devices, const OpDef& op, const OpSample& sample, unsigned seed) {
  std::mt19937 random(seed);
  Graph g(devices.graph_options());
  std::vector<Tensor> in, expected;
  std::vector<HostArray> values;
  for (size_t i = 0; i < sample.inputs.size(); ++i) {
    in.push_back(g.input("x" + std::to_string(i), sample.inputs[i]));
    values.push_back(random_values(sample.inputs[i], sample.low, sample.high, random));
    const bool wants = sample.differentiate.empty() ? is_float(sample.inputs[i].dtype) : sample.differentiate[i];
    if (wants && op.vjp && op.vjp != no_gradient) expected.push_back(in.back());
  }
  const std::vector<Tensor> out = apply_sample(op, g, in, sample.attributes);
  Tensor loss;
  for (size_t i = 0; i < out.size(); ++i) {
    const bool on_host = std::any_cast<Memory>(&sample.attributes) != nullptr;  // a program's outputs are not
    g.output("y" + std::to_string(i), on_host ? place(out[i], Memory::device) : out[i]);
    if (!is_float(out[i].dtype()) || expected.empty()) continue;
    const Tensor term =
        sum(cast(out[i], DType::f32) * constant(g, random_values({DType::f32, out[i].dims()}, 0.5, 1.5, random)));
    loss = loss ? loss + term : term;
  }
  if (loss) {
    const std::vector<Tensor> grads = grad(loss, expected);
    for (size_t i = 0; i < grads.size(); ++i)
      if (grads[i]) g.output("g" + std::to_string(i), grads[i]);
  }
  const std::vector<HostArray> all = evaluate(devices, g, values);
  const auto middle = all.begin() + static_cast<long>(out.size());
  return {{all.begin(), middle}, {middle, all.end()}};
}

class RecordsOnDevice : public testing::TestWithParam<const OpDef*> {};

TEST_P(RecordsOnDevice, GiveWhatTheCpuGives) {
  const OpDef& op = *GetParam();
  double outputs = 0, gradients = 0;
  unsigned seed = 20260229;
  for (const OpSample& sample : op.samples()) try {
      const Results device = run(one_device(), op, sample, ++seed), host = run(host_device(), op, sample, seed);
      ASSERT_EQ(device.gradients.size(), host.gradients.size());
      outputs = std::max(outputs, device_distance(device.outputs, host.outputs));
      gradients = std::max(gradients, device_distance(device.gradients, host.gradients));
    } catch (const Error& e) {
      ADD_FAILURE() << e.what();
    }
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({})\n", outputs, op.name, gradients, op.name);
  EXPECT_LE(outputs, kLargest);
  EXPECT_LE(gradients, kLargest);
}

std::vector<const OpDef*> with_samples() {
  std::vector<const OpDef*> out;
  for (const OpDef* op : all_ops())
    if (op->samples) out.push_back(op);
  return out;
}

INSTANTIATE_TEST_SUITE_P(All, RecordsOnDevice, testing::ValuesIn(with_samples()),
                         [](const auto& info) { return std::to_string(info.index) + "_" + info.param->name; });

}  // namespace
}  // namespace md
