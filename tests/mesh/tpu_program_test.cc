// The TPU compiler's result for a small step on four devices that this machine does not have: layout changes, product
// types, and gathered arrays. Needs libtpu, which `./run test` fetches.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/quantization_keys.h"
#include "maxdiffusion/ops/attention.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/sharding.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/mesh/update_step.h"
#include "tests/topology.h"

namespace md {
namespace {

constexpr int64_t kChannels = 256;

/// Traces two convolutions, a linear layer and AdamW; weights in f32, layers in bf16.
void trace(Graph& g, const std::string& quantization) {
  QuantizationKeys keys;
  keys.use_qwix_quantization = !quantization.empty();
  keys.quantization = quantization;
  ParamTable params;
  const Scope s(g, params, "net", {.activations = DType::bf16, .quantization = make_quantization(keys)});
  const Tensor x = g.input("x", {DType::bf16, {8, 16, 16, kChannels}}, axis::of_batch(4)),
               step = g.input("step", {DType::s32, {}});
  auto laid = [](Tensor t) { return shard(t, {axis::kConvBatch, "", "", axis::kOutChannels}); };
  Tensor y = laid(nn::conv2d(s / "conv1", x, {.out = kChannels}));
  y = laid(nn::conv2d(s / "conv2", y * y, {.out = kChannels}));
  y = laid(nn::linear(s / "to_q", y * y, {.out = kChannels, .in_axis = axis::kEmbed, .out_axis = axis::kHeads}));
  const Tensor loss = mean(square(cast(y, DType::f32)));
  update_step(g, params, loss, OptimConfig(), step);
  g.output("loss", loss);
}

AheadOfTime compiled(const MeshConfig& config, const std::function<void(Graph&)>& program, bool windows = true) {
  static const pjrt::Topology tpus = absent_devices("tpu", "v5p:2x2x1");
  const Mesh mesh = Mesh::make(config, topology(tpus));
  const AxisRules rules = AxisRules::defaults();
  GraphOptions options = graph_options(mesh, topology(tpus), &rules);
  EXPECT_NE(options.memory_order, nullptr);
  if (!windows) options.memory_order = nullptr;
  Graph g(options);
  program(g);
  return compile_ahead(tpus, mesh, g, {}, "small step");
}
AheadOfTime compiled(const MeshConfig& config, const std::string& quantization = "", bool windows = true) {
  return compiled(
      config, [&](Graph& g) { trace(g, quantization); }, windows);
}

const MeshConfig kData{.ici_data_parallelism = 4}, kFsdp{.ici_data_parallelism = 1, .ici_fsdp_parallelism = 4};

/// Bytes of transposed f32 arrays that have the size of a convolution weight, or of a device's part of one.
int64_t turned_weights(const AheadOfTime& ahead, int64_t parts) {
  int64_t bytes = 0;
  for (const pjrt::Turned& t : ahead.turned)
    if (t.bytes == kChannels * kChannels * 3 * 3 * 4 / parts) bytes += t.bytes;
  return bytes;
}

double gathered(const AheadOfTime& ahead) {
  double bytes = 0;
  for (const CollectiveSum& c : ahead.collectives.value())
    if (c.kind == "all-gather") bytes += c.bytes;
  return bytes;
}

TEST(TpuProgram, TurnsNoWeightsOfConvolutionsNorTheirMoments) {
  EXPECT_GT(turned_weights(compiled(kData, "", false), 1), 0);
  EXPECT_EQ(turned_weights(compiled(kData), 1), 0);
  EXPECT_EQ(turned_weights(compiled(kFsdp), 4), 0);
}

// The forward pass has three products of 8-bit copies; int8 gradients are not quantized (docs/memory.md).
// S2-105
TEST(TpuProgram, OfInt8MultipliesBytesAndGathersBytes) {
  const AheadOfTime wide = compiled(kFsdp), narrow = compiled(kFsdp, "int8");
  EXPECT_EQ(wide.products.count("s8 × s8 → s32"), 0U);
  ASSERT_EQ(narrow.products.count("s8 × s8 → s32"), 1U);
  EXPECT_EQ(narrow.products.at("s8 × s8 → s32"), 3);
  // Weights are gathered once as bf16, the compute type, not as stored f32.
  const double convolutions = kChannels * kChannels * 3 * 3 * 2, linear = kChannels * kChannels;
  EXPECT_NEAR(gathered(wide) / (2 * (convolutions + linear)), 1, 0.1);
  // Gathered as bytes; the linear layer's weight also as bf16, for its gradient.
  EXPECT_NEAR(gathered(narrow) / (convolutions + 3 * linear), 1, 0.1);
}

// Per layer and device, logits have 16 MiB and queries 0.25 MiB.
TEST(TpuProgram, KeepsNoLogitsForTheWayBack) {
  auto temporary = [](int layers) {
    auto attentions = [&](Graph& g) {
      const Tensor x = g.input("x", {DType::bf16, {4, 1024, 4, 64}}, axis::of_batch(4));
      const AttentionAxes axes{axis::kBatch, axis::kLength, axis::kKvLength, axis::kHeadsAct, axis::kKv};
      Tensor y = x;
      for (int i = 0; i < layers; ++i) y = attention(y, y, y, {.kernel = "dot_product", .axes = axes});
      g.output("gradient", grad(sum(square(cast(y, DType::f32))), {x})[0]);
    };
    return compiled(kData, attentions).memory->temporary;
  };
  const auto few = temporary(2), many = temporary(6);
  EXPECT_LT((many - few) / 4, 2 << 20) << few << " " << many;
}

}  // namespace
}  // namespace md
