// What the compiled training step splits along each mesh axis, under the reference's logical_axis_rules and under the
// built-in ones: per-device shapes, read from the compiler's text.

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <sstream>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/resnet_block.h"
#include "maxdiffusion/models/transformer2d.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/runtime/unused_mesh_axes.h"
#include "tests/topology.h"

namespace md {
namespace {

constexpr int64_t kBatch = 16, kSide = 8, kLength = kSide * kSide, kText = 24, kWidth = 32, kHeads = 16;

/// From the reference's base_xl.yml.
constexpr const char* kReferenceRules = R"([
  ['batch', 'data'], ['activation_batch', ['data', 'fsdp']], ['activation_heads', 'tensor'],
  ['activation_kv', 'tensor'], ['embed', 'fsdp'], ['heads', 'tensor'], ['conv_batch', ['data', 'fsdp']],
  ['out_channels', 'tensor'], ['conv_out', 'fsdp']])";

ShardingKeys reference_keys(bool uniform = true) {
  return {.logical_axis_rules = {kReferenceRules},
          .data_sharding = {"[['data', 'fsdp', 'context', 'tensor']]"},
          .attention_sharding_uniform = uniform};
}

MeshConfig eight_along(const std::string& axis) {
  MeshConfig c;
  c.ici_data_parallelism = axis == "data" ? 8 : 1;
  c.ici_fsdp_parallelism = axis == "fsdp" ? 8 : 1;
  c.ici_context_parallelism = axis == "context" ? 8 : 1;
  c.ici_tensor_parallelism = axis == "tensor" ? 8 : 1;
  return c;
}

/// One gradient descent step on a residual block and a transformer block: the annotated parts of a UNet.
void trace_unet(Graph& g) {
  ParamTable params;
  const Scope s(g, params, "unet");
  Tensor x = g.input("sample", {DType::f32, {kBatch, kSide, kSide, kWidth}}, {axis::kData, "", "", ""});
  Tensor text = g.input("text", {DType::f32, {kBatch, kText, kWidth}}, {axis::kData, "", ""});
  x = resnet_block(s / "resnet", x, {}, {.out = kWidth, .groups = 8});
  x = transformer2d(s / "attention", x, text, {.heads = kHeads, .groups = 8, .linear_projection = true});
  Tensor loss = mean(square(x));
  std::vector<Tensor> values;
  for (const Param& p : params.params()) values.push_back(p.value);
  const std::vector<Tensor> slopes = grad(loss, values);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string& name = params.params()[i].input;
    g.output(name, values[i] - slopes[i] * 0.1, name);
    g.alias(name, name);
  }
  g.output("loss", loss);
}

/// The loss of one Wan block with its 40 heads, on videos of 16 tokens and texts of 12.
constexpr int64_t kWanHeads = 40, kHeadSize = 6, kTokens = 16, kWords = 12, kWanHidden = 64;
void trace_wan(Graph& g, int64_t batch) {
  const WanTransformerConfig c{.num_attention_heads = kWanHeads,
                               .attention_head_dim = kHeadSize,
                               .in_channels = 4,
                               .out_channels = 4,
                               .text_dim = 16,
                               .freq_dim = 16,
                               .ffn_dim = kWanHidden,
                               .num_layers = 1};
  ParamTable params;
  auto input = [&](const char* name, Dims dims) {
    dims.insert(dims.begin(), batch);
    return g.input(name, {DType::f32, dims}, axis::of_batch(dims.size()));
  };
  const WanInputs in{
      .sample = input("sample", {2, 4, 8, 4}), .timestep = input("timestep", {}), .text = input("text", {kWords, 16})};
  const ScopeOptions options{.attention = "dot_product"};
  g.output("loss", mean(square(wan_transformer(Scope(g, params, "wan", options), c, in))));
}

struct Compiled {
  std::map<std::string, Sharding> inputs;
  std::string text;     // of one device's program, after optimization
  bool of_tpu = false;  // TPU programs express products as convolutions
  std::vector<std::string> idle;
  std::string warnings;

  /// Result dims of operations of this kind in the forward pass of the layer at `path`.
  std::vector<Dims> all_sizes(const std::string& kind, const std::string& path) const {
    const std::string name = path + (kind == "convolution" && !of_tpu ? "/convolution\"" : "/dot_general\"");
    std::vector<Dims> all;
    std::string others;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.find(" " + kind + "(") != line.npos) others += line + "\n";
      const size_t open = line.find("= f32["), call = line.find("} " + kind + "(");
      if (open == line.npos || call == line.npos || line.find(name) == line.npos) continue;
      Dims& dims = all.emplace_back();
      std::istringstream list(line.substr(open + 6, line.find(']', open) - open - 6));
      for (std::string d; std::getline(list, d, ',');) dims.push_back(std::stoll(d));
    }
    EXPECT_FALSE(all.empty()) << "no " << kind << " of " << path << " among\n" << others;
    return all;
  }
  Dims sizes(const std::string& kind, const std::string& path) const {
    const std::vector<Dims> all = all_sizes(kind, path);
    return all.empty() ? Dims() : all[0];
  }
  int64_t elements(const std::string& kind, const std::string& path) const {
    return Shape{DType::f32, sizes(kind, path)}.elements();
  }
};

CompileConfig dumping(const TemporaryFolder& folder) {
  return {.jax_cache_dir = "off",
          .xla_flags = "--xla_backend_optimization_level=0 --xla_dump_hlo_as_text=True --xla_dump_to=" + folder.path()};
}
std::string dumped(const TemporaryFolder& folder) {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    if (entry.path().string().ends_with("after_optimizations.txt")) text = read_file(entry.path().string());
  EXPECT_FALSE(text.empty()) << "the compiler wrote no text into " << folder.path();
  return text;
}

using Trace = std::function<void(Graph&)>;

Compiled compiled(const MeshConfig& mesh, const AxisRules& rules, const Trace& trace) {
  const Devices devices = Devices::open("cpu", 8, mesh);
  GraphOptions options = devices.graph_options(&rules);
  options.cpu_kernels = {};  // products must be visible in the text
  Graph g(options);
  trace(g);
  const TemporaryFolder folder;
  const Program program = compile(devices, g, dumping(folder), "split");
  Compiled out;
  for (size_t i = 0; i < program.input_names().size(); ++i)
    out.inputs[program.input_names()[i]] = program.input_sharding(i);
  out.text = dumped(folder);
  out.idle = unused_mesh_axes(g);
  testing::internal::CaptureStderr();
  warn_of_unused_mesh_axes(g, "step");
  out.warnings = testing::internal::GetCapturedStderr();
  return out;
}

Compiled compiled(const MeshConfig& mesh, const ShardingKeys& keys) {
  return compiled(mesh, AxisRules::make(keys, mesh.mesh_axes), trace_unet);
}

class Split : public testing::TestWithParam<bool> {
 protected:
  static Compiled along(const std::string& axis) {
    return compiled(eight_along(axis), GetParam() ? reference_keys() : ShardingKeys{});
  }
};
INSTANTIATE_TEST_SUITE_P(Rules, Split, testing::Values(true, false),
                         [](const auto& rules) { return rules.param ? "Reference" : "BuiltIn"; });

const std::string kBlock = "attention.transformer_blocks.0";
constexpr int64_t kConvElements = kBatch * kLength * kWidth, kHiddenElements = kBatch * kLength * 8 * kWidth;
using Axes = std::vector<std::vector<std::string>>;

// S1-7
TEST_P(Split, DataSplitsTheBatch) {
  const Compiled c = along("data");
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn1"), (Dims{kBatch / 8, kHeads, kLength, kLength}));
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn2"), (Dims{kBatch / 8, kHeads, kLength, kText}));
  EXPECT_EQ(c.elements("dot", kBlock + ".ff.net.0.proj"), kHiddenElements / 8);
  EXPECT_EQ(c.elements("convolution", "resnet.conv1"), kConvElements / 8);
  for (const auto& [name, sharding] : c.inputs) EXPECT_EQ(sharding.replicated(), name.starts_with("unet/")) << name;
  EXPECT_EQ(c.warnings, "");
}

// S1-12
TEST_P(Split, FsdpSplitsTheBatchAndTheWeights) {
  const Compiled c = along("fsdp");
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn1"), (Dims{kBatch / 8, kHeads, kLength, kLength}));
  EXPECT_EQ(c.elements("convolution", "resnet.conv1"), kConvElements / 8);
  EXPECT_EQ(c.inputs.at("unet/" + kBlock + ".attn1.to_q.weight").dims, (Axes{{}, {"fsdp"}}));
  EXPECT_EQ(c.inputs.at("unet/" + kBlock + ".ff.net.0.proj.weight").dims, (Axes{{}, {"fsdp"}}));
  EXPECT_EQ(c.inputs.at("unet/resnet.conv1.weight").dims, (Axes{{"fsdp"}, {}, {}, {}}));
  EXPECT_EQ(c.warnings, "");
}

// S1-17, S1-19, S4-19
TEST_P(Split, ContextSplitsAttention) {
  const Compiled c = along("context");
  // Whole sequences of two heads; the text is not split, so cross attention keeps a part of the queries.
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn1"), (Dims{kBatch, kHeads / 8, kLength, kLength}));
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn2"), (Dims{kBatch, kHeads, kLength / 8, kText}));
  EXPECT_EQ(c.elements("dot", kBlock + ".ff.net.0.proj"), kHiddenElements / 8);
  EXPECT_EQ(c.warnings, "");
}

// S1-22, S1-23
TEST_P(Split, TensorSplitsHeadsFeedForwardAndChannels) {
  const Compiled c = along("tensor");
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn1"), (Dims{kBatch, kHeads / 8, kLength, kLength}));
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn2"), (Dims{kBatch, kHeads / 8, kLength, kText}));
  EXPECT_EQ(c.elements("dot", kBlock + ".ff.net.0.proj"), kHiddenElements / 8);
  EXPECT_EQ(c.elements("convolution", "resnet.conv1"), kConvElements / 8);
  EXPECT_EQ(c.inputs.at("unet/" + kBlock + ".attn1.to_q.weight").dims, (Axes{{"tensor"}, {}}));
  EXPECT_EQ(c.inputs.at("unet/" + kBlock + ".attn2.to_out.0.weight").dims, (Axes{{}, {"tensor"}}));
  EXPECT_EQ(c.inputs.at("unet/" + kBlock + ".ff.net.2.weight").dims, (Axes{{}, {"tensor"}}));
  EXPECT_EQ(c.warnings, "");
}

const std::string kWanBlock = "blocks.0";

/// Weights are split over fsdp, however the batch is split.
void expect_weights_over_fsdp(const Compiled& c) {
  EXPECT_EQ(c.inputs.at("wan/" + kWanBlock + ".attn1.to_q.weight").dims, (Axes{{}, {"fsdp"}}));
  EXPECT_EQ(c.inputs.at("wan/" + kWanBlock + ".ffn.net.2.weight").dims, (Axes{{"fsdp"}, {}}));
  EXPECT_EQ(c.warnings, "");
}

Compiled wan_on_data2_fsdp4(int64_t batch) {
  MeshConfig mesh = eight_along("fsdp");
  mesh.ici_data_parallelism = 2, mesh.ici_fsdp_parallelism = 4;
  const ShardingKeys keys{.logical_axis_rules = {kWanAxisRules}, .data_sharding = {}};
  return compiled(mesh, AxisRules::make(keys, mesh.mesh_axes, true), [batch](Graph& g) { trace_wan(g, batch); });
}

// S0-86…89, S1-20, S1-21, S2-71
TEST(SplitWan, FsdpShardsTheSequenceOfSmallBatches) {
  const Compiled c = wan_on_data2_fsdp4(4);
  // Two rows, with a quarter of each sequence; in attention whole sequences with a quarter of the heads, after an
  // all-to-all.
  EXPECT_EQ(c.sizes("dot", kWanBlock + ".attn1"), (Dims{2, kWanHeads / 4, kTokens, kTokens}));
  EXPECT_EQ(c.sizes("dot", kWanBlock + ".attn2"), (Dims{2, kWanHeads, kTokens / 4, kWords}));
  EXPECT_EQ(c.elements("dot", kWanBlock + ".ffn.net.0.proj"), 2 * kTokens / 4 * kWanHidden);
  EXPECT_EQ(c.elements("dot", kWanBlock + ".attn1.to_q"), 2 * kTokens / 4 * kWanHeads * kHeadSize);
  expect_weights_over_fsdp(c);
}

/// The meshes of the documented commands: the part of a batch that a device computes.
struct OfDocuments {
  const char* topology;
  int64_t data, batch, tokens, heads;
};
class SplitWanOnTpus : public testing::TestWithParam<OfDocuments> {};
// S0-86…89, S1-20, S1-21, S3-23
TEST_P(SplitWanOnTpus, GivesEachDeviceItsRowsTokensAndHeads) {
  const auto& [name, data, batch, tokens, heads] = GetParam();
  const pjrt::Topology tpus = absent_devices("tpu", name);
  const MeshConfig config{.ici_data_parallelism = data, .ici_fsdp_parallelism = 4};
  const Mesh mesh = Mesh::make(config, topology(tpus));
  EXPECT_EQ(mesh.devices(), data * 4);
  const ShardingKeys keys{.logical_axis_rules = {kWanAxisRules}, .data_sharding = {}};
  const AxisRules rules = AxisRules::make(keys, config.mesh_axes, true);
  Graph g(graph_options(mesh, topology(tpus), &rules));
  trace_wan(g, batch);
  const TemporaryFolder folder;
  compile_ahead(tpus, mesh, g, dumping(folder), "split");
  Compiled c;
  c.text = dumped(folder);
  c.of_tpu = true;
  const int64_t rows = 1;
  EXPECT_EQ(c.elements("convolution", kWanBlock + ".attn1.to_q"), rows * tokens * kWanHeads * kHeadSize);
  EXPECT_EQ(c.elements("convolution", kWanBlock + ".ffn.net.0.proj"), rows * tokens * kWanHidden);
  std::multiset<int64_t> attention;
  for (const Dims& dims : c.all_sizes("convolution", kWanBlock + ".attn1"))
    attention.insert(Shape{DType::f32, dims}.elements());
  const int64_t cosines = tokens * kHeadSize, rotated = rows * tokens * kWanHeads * kHeadSize;  // of rotary positions
  EXPECT_EQ(attention, (std::multiset<int64_t>{cosines, cosines, rotated, rotated, rows * heads * kTokens * kHeadSize,
                                               rows * heads * kTokens * kTokens}));
}
INSTANTIATE_TEST_SUITE_P(Documents, SplitWanOnTpus,
                         testing::Values(OfDocuments{"v5p:2x2x1", 1, 1, kTokens / 4, kWanHeads / 4},
                                         OfDocuments{"v5p:4x4x8", 32, 32, kTokens / 4, kWanHeads / 4},
                                         OfDocuments{"v5p:4x4x8", 32, 128, kTokens, kWanHeads}),
                         [](const auto& info) { return "BatchOf" + std::to_string(info.param.batch); });

// S0-86…89
TEST(SplitWan, FsdpDividesTheRowsThatItCan) {
  const Compiled c = wan_on_data2_fsdp4(16);
  EXPECT_EQ(c.sizes("dot", kWanBlock + ".attn1"), (Dims{2, kWanHeads, kTokens, kTokens}));
  EXPECT_EQ(c.sizes("dot", kWanBlock + ".attn2"), (Dims{2, kWanHeads, kTokens, kWords}));
  EXPECT_EQ(c.elements("dot", kWanBlock + ".ffn.net.0.proj"), 2 * kTokens * kWanHidden);
  expect_weights_over_fsdp(c);
}

// S4-19, P-13
TEST(IdleAxes, ContextIsOneWithoutUniformAttention) {
  const Compiled c = compiled(eight_along("context"), reference_keys(false));
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn1"), (Dims{kBatch, kHeads, kLength, kLength}));
  EXPECT_EQ(c.idle, std::vector<std::string>{"context"});
  EXPECT_NE(c.warnings.find("step: the mesh axis 'context' splits no weight and no activation"), std::string::npos)
      << c.warnings;
}

// The autoencoder and the text encoders have no annotations: the split of their batch propagates.
// P-13
TEST(IdleAxes, BatchesCountWhereNothingIsAnnotated) {
  GraphOptions options;
  options.mesh_axes = {{"data", 2}, {"context", 4}};
  options.resolve = [](const LogicalAxes& names, const Dims&) {
    return names[0] == axis::kData ? DimAxes{{"data"}} : DimAxes{{}};
  };
  Graph g(options);
  g.output("y", square(g.input("x", {DType::f32, {8}}, {axis::kData})));
  EXPECT_EQ(unused_mesh_axes(g), std::vector<std::string>{"context"});
}

}  // namespace
}  // namespace md
