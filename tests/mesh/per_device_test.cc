// Norms and convolutions on meshes: each device calls the CPU kernel with its part, and together the results are those
// of one device.
#include "maxdiffusion/ops/per_device.h"

#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/one_device.h"

namespace md {
namespace {

SharedDevices& kEight = SharedDevices::add([] {
  return Devices::open("cpu", 8, {.ici_data_parallelism = 2, .ici_fsdp_parallelism = 2, .ici_tensor_parallelism = 2});
});
const Devices& eight() { return kEight.get(); }

struct Case {
  const char* name;
  Dims x;
  std::function<Tensor(const Scope&, Tensor)> layer;
};
std::vector<Case> cases() {
  using nn::conv2d, nn::conv3d, nn::group_norm, nn::layer_norm, nn::linear;
  return {
      {"batch and channels split", {8, 4, 4, 32}, [](auto& s, Tensor x) { return group_norm(s, x, 8, 1e-5, "silu"); }},
      {"a group would be on two devices", {4, 3, 5, 24}, [](auto& s, Tensor x) { return group_norm(s, x, 3, 1e-5); }},
      {"nothing divides", {3, 3, 5, 21}, [](auto& s, Tensor x) { return group_norm(s, x, 7, 1e-5); }},
      {"as the batch", {8, 4, 4, 6}, [](auto& s, Tensor x) { return group_norm(s, x, 3, 1e-5, "", false); }},
      {"rows", {4, 6, 24}, [](auto& s, Tensor x) { return layer_norm(s, x, 1e-5); }},
      {"rows without length", {8, 24}, [](auto& s, Tensor x) { return layer_norm(s, x, 1e-5); }},
      {"output channels split", {4, 7, 6, 6}, [](auto& s, Tensor x) { return conv2d(s, x, {.out = 10, .stride = 2}); }},
      {"output channels whole", {4, 7, 6, 6}, [](auto& s, Tensor x) { return conv2d(s, x, {.out = 5}); }},
      {"a wide layer",
       {4, 64, 64},
       [](auto& s, Tensor x) { return linear(s, x, {.out = 128, .in_axis = axis::kEmbed, .out_axis = axis::kHeads}); }},
      {"a layer that sums over devices",
       {4, 64, 64},
       [](auto& s, Tensor x) { return linear(s, x, {.out = 128, .in_axis = axis::kHeads, .out_axis = axis::kEmbed}); }},
      {"a layer of text encoders", {8, 64, 64}, [](auto& s, Tensor x) { return linear(s, x, {.out = 128}); }},
      {"frames", {8, 3, 4, 5, 3}, [](auto& s, Tensor x) { return conv3d(s, x, {.out = 4}); }},
  };
}

/// All cases in one program: results, then gradients of x and of the parameters.
struct Traced {
  explicit Traced(const Devices& devices) : rules(AxisRules::defaults()), graph(options(devices, rules)) {
    std::vector<Tensor> expected;
    Tensor loss;
    for (const Case& c : cases()) {
      LogicalAxes axes(c.x.size());
      axes[0] = axis::kData;
      Tensor x = graph.input(c.name, {DType::f32, c.x}, axes);
      expected.push_back(x);
      Tensor y = c.layer(Scope(graph, table, c.name), x);
      graph.output(std::string("y of ") + c.name, y);
      Tensor one = sum(sin(y));  // each element gets a different gradient
      loss = loss ? loss + one : one;
    }
    for (const Param& p : table.params()) expected.push_back(p.value);
    size_t i = 0;
    for (Tensor d : grad(loss, expected)) graph.output("gradient " + std::to_string(i++), d);
  }
  std::vector<std::vector<double>> run(const Devices& devices) const {
    std::vector<HostArray> in;
    for (const GraphInput& input : graph.inputs()) {
      const HostRng rng(1, input.name);
      HostArray a(input.value.shape());
      rng.fill(HostRng::Distribution::normal, 1, 0.5, a.mutable_view<float>());
      in.push_back(std::move(a));
    }
    std::vector<std::vector<double>> out;
    for (const HostArray& a : evaluate(devices, graph, in)) out.push_back(a.to_doubles());
    return out;
  }

  static GraphOptions options(const Devices& devices, const AxisRules& rules) {
    GraphOptions o = devices.graph_options(&rules);
    o.cpu_kernels.f32_products = true;  // regardless of which is faster on this processor
    return o;
  }

  AxisRules rules;
  Graph graph;
  ParamTable table;
};

int count(const std::string& text, const std::string& word) {
  int n = 0;
  for (size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1)) ++n;
  return n;
}

// P-21
TEST(PerDevice, KernelsOnAMeshEqualOneDevice) {
  const Traced split(eight()), whole(one_device());
  const std::string text = to_stablehlo(split.graph);
  for (const char* kernel : {kGroupNormKernel, kGroupNormGradKernel})
    EXPECT_EQ(count(text, std::string("\"") + kernel + '"'), 4) << kernel;
  for (const char* kernel : {kLayerNormKernel, kLayerNormGradKernel})
    EXPECT_EQ(count(text, std::string("\"") + kernel + '"'), 2) << kernel;
  for (const char* kernel : {kConvolutionKernel, kConvolutionInputGradKernel, kConvolutionWeightGradKernel})
    EXPECT_EQ(count(text, std::string("\"") + kernel + '"'), 3) << kernel;
  EXPECT_EQ(count(text, std::string("\"") + kProductKernel + '"'), 3 * 3);
  EXPECT_EQ(count(text, "stablehlo.convolution"), 0);

  const auto a = split.run(eight()), b = whole.run(one_device());
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    double difference = 0, size = 0;
    for (size_t k = 0; k < a[i].size(); ++k) difference += std::pow(a[i][k] - b[i][k], 2), size += std::pow(b[i][k], 2);
    EXPECT_LE(std::sqrt(difference), 2e-6 * std::sqrt(size)) << split.graph.outputs()[i].name;
  }
}

TEST(PerDevice, NoKernelWithoutLogicalAxes) {
  Graph g(eight().graph_options());
  Tensor x = g.input("x", {DType::f32, {8, 4, 4, 8}});
  EXPECT_FALSE(kernels_support_shards({x}));
  ParamTable table;
  g.output("y", nn::conv2d(Scope(g, table, "m"), x, {.out = 4}));
  EXPECT_EQ(count(to_stablehlo(g), "custom_call"), 0);
}

}  // namespace
}  // namespace md
