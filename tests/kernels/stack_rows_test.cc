// Loops over stacks of bf16 rows: what they compute, and that no copy of a stack is made for it.
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

constexpr int64_t kLayers = 12, kWidth = 320, kTokens = 128;  // rows of 200 KiB, stacked results of 80 KiB each

const std::vector<HostArray>& inputs() {
  static const std::vector<HostArray> arrays = {normal({DType::bf16, {kTokens, kWidth}}, 1),
                                                normal({DType::bf16, {kLayers, kWidth, kWidth}}, 2, 0.05)};
  return arrays;
}

Tensor layer(Tensor x, Tensor w) { return x + tanh(dot(x, w, {.lhs_contract = {1}, .rhs_contract = {1}})); }

/// in: x, stack of weights. Results: the last layer's, and those of all layers, stacked.
std::vector<Tensor> in_loop(const std::vector<Tensor>& in) {
  const ScanResult r = scan(kLayers, {in[0]}, [&](ScanStep& step, const std::vector<Tensor>& x) {
    const Tensor y = layer(x[0], step.slice(in[1]));
    return ScanResult{{y}, {y}};
  });
  return {r.carry[0], r.stacked[0]};
}

std::vector<Tensor> one_by_one(const std::vector<Tensor>& in) {
  std::vector<Tensor> all;
  Tensor x = in[0];
  for (int64_t i = 0; i < kLayers; ++i) {
    x = layer(x, squeeze(slice_axis(in[1], 0, i, i + 1), 0));
    all.push_back(expand_dims(x, 0));
  }
  return {x, concatenate(all, 0)};
}

TEST(StackRows, AreReadAndWrittenInPlace) {
  expect_agreement(in_loop, inputs(), 2e-2, {"md_read_row", "md_write_row"});
  std::vector<HostArray> dys = {normal({DType::bf16, {kTokens, kWidth}}, 3),
                                normal({DType::bf16, {kLayers, kTokens, kWidth}}, 4)};
  const CpuKernels kernels{.callable = true, .f32_products = true};
  const auto looped = outputs_and_gradients(in_loop, inputs(), dys, kernels),
             unrolled = outputs_and_gradients(one_by_one, inputs(), dys, kernels);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(relative_error(looped[i], unrolled[i]), 0) << "output " << i;
}

/// Temporary bytes of the forward loop with weights of this type.
int64_t temporary_bytes(DType type, CpuKernels kernels) {
  GraphOptions options = one_device().graph_options();
  options.cpu_kernels = kernels;
  Graph g(options);
  const Tensor x = g.input("x", inputs()[0].shape()), w = g.input("w", {type, inputs()[1].dims()});
  const ScanResult r = scan(kLayers, {x}, [&](ScanStep& step, const std::vector<Tensor>& carry) {
    return ScanResult{{layer(carry[0], cast(step.slice(w), DType::bf16))}, {}};
  });
  g.output("y", r.carry[0]);
  return compile(one_device(), g, {}, "stack").memory().value().temporary;
}

TEST(StackRows, NeedNoCopyOfTheStack) {
  for (const DType type : {DType::bf16, DType::f16, DType::f8e4m3fn}) {
    const int64_t elements = inputs()[1].shape().elements(), stack = elements * static_cast<int64_t>(size_of(type)),
                  layers = 8 * elements / kLayers;  // what two layers and their activations take in float32
    EXPECT_LT(temporary_bytes(type, {.callable = true, .f32_products = true}), layers) << to_string(type);
    // Without kernels it is copied once, as integers; as float32 it would be two or four times its size.
    EXPECT_LT(temporary_bytes(type, {}), stack + layers) << to_string(type);
  }
}

}  // namespace
}  // namespace md
