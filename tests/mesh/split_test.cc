// What the compiled program of a training step splits along each mesh axis, under the reference's logical_axis_rules
// and under the built-in ones: shapes of what one device computes, read from the compiler's own text.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <sstream>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/resnet_block.h"
#include "maxdiffusion/models/transformer2d.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/runtime/idle_axes.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {
namespace {

constexpr int64_t kBatch = 16, kSide = 8, kLength = kSide * kSide, kText = 24, kWidth = 32, kHeads = 16;

/// As in the reference's base_xl.yml.
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

/// A step of gradient descent on a residual block and a transformer block: the annotated parts of a UNet.
void trace(Graph& g) {
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

struct Compiled {
  std::map<std::string, Sharding> inputs;
  std::string text;  // of the program of one device, after optimisation
  std::vector<std::string> idle;
  std::string warnings;

  /// Sizes of the result of the first operation of this kind, in the forward pass, of the layer at `path`.
  Dims sizes(const std::string& kind, const std::string& path) const {
    const std::string name = path + "/" + (kind == "dot" ? "dot_general" : kind) + "\"";
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const size_t open = line.find("= f32["), call = line.find("} " + kind + "(");
      if (open == line.npos || call == line.npos || line.find(name) == line.npos) continue;
      Dims dims;
      std::istringstream list(line.substr(open + 6, line.find(']', open) - open - 6));
      for (std::string d; std::getline(list, d, ',');) dims.push_back(std::stoll(d));
      return dims;
    }
    std::string others;
    lines.clear();
    lines.seekg(0);
    for (std::string line; std::getline(lines, line);)
      if (line.find(" " + kind + "(") != line.npos) others += line + "\n";
    ADD_FAILURE() << "no " << kind << " of " << path << " among\n" << others;
    return {};
  }
  int64_t elements(const std::string& kind, const std::string& path) const {
    return Shape{DType::f32, sizes(kind, path)}.elements();
  }
};

Compiled compiled(const MeshConfig& mesh, const ShardingKeys& keys) {
  const Devices devices = Devices::open("cpu", 8, mesh);
  const AxisRules rules = AxisRules::make(keys, mesh.mesh_axes);
  GraphOptions options = devices.graph_options(&rules);
  options.cpu_kernels = {};  // products are read from the text
  Graph g(options);
  trace(g);
  const TemporaryFolder folder;
  const CompileConfig config{.jax_cache_dir = "off",
                             .xla_flags =
                                 "--xla_backend_optimization_level=0 --xla_dump_hlo_as_text=True "
                                 "--xla_dump_to=" +
                                 folder.path()};
  const Program program = compile(devices, g, config, "split");
  Compiled out;
  for (size_t i = 0; i < program.input_names().size(); ++i)
    out.inputs[program.input_names()[i]] = program.input_sharding(i);
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    if (entry.path().string().ends_with("after_optimizations.txt")) out.text = read_file(entry.path().string());
  EXPECT_FALSE(out.text.empty()) << "the compiler wrote no text into " << folder.path();
  out.idle = idle_axes(g);
  testing::internal::CaptureStderr();
  warn_of_idle_axes(g, "step");
  out.warnings = testing::internal::GetCapturedStderr();
  return out;
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
  // Whole sequences of two heads; the text is whole, and so the queries stay.
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

// S4-19, P-13
TEST(IdleAxes, ContextIsOneWithoutUniformAttention) {
  const Compiled c = compiled(eight_along("context"), reference_keys(false));
  EXPECT_EQ(c.sizes("dot", kBlock + ".attn1"), (Dims{kBatch, kHeads, kLength, kLength}));
  EXPECT_EQ(c.idle, std::vector<std::string>{"context"});
  EXPECT_NE(c.warnings.find("step: the mesh axis 'context' splits no weight and no activation"), std::string::npos)
      << c.warnings;
}

// The autoencoder and the text encoders are not annotated: the split of their batch carries on.
// P-13
TEST(IdleAxes, BatchesCountWhereNothingIsAnnotated) {
  GraphOptions options;
  options.mesh_axes = {{"data", 2}, {"context", 4}};
  options.resolve = [](const LogicalAxes& names, const Dims&) {
    return names[0] == axis::kData ? DimAxes{{"data"}} : DimAxes{{}};
  };
  Graph g(options);
  g.output("y", square(g.input("x", {DType::f32, {8}}, {axis::kData})));
  EXPECT_EQ(idle_axes(g), std::vector<std::string>{"context"});
}

}  // namespace
}  // namespace md
