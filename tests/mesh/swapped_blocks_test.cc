// Matrices of blocks that stay in the host's memory (ScopeOptions::blocks_to_swap): the TPU's and the GPU's compiler
// copy one block at a time to the device, while another block runs. Neither device is on this machine: programs are
// checked by the compilers' statistics and schedules, and their values by running the TPU's text on the CPU without its
// memory kinds. Needs libtpu and the CUDA plugin, which `./run test` fetches.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <regex>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/topology.h"

namespace md {
namespace {

constexpr int64_t kBlocks = 8, kSwapped = 5;

/// A stack of blocks of two frozen layers and a trained scale; the loss of its output and the scales' gradients.
struct Stack {
  int64_t rows, width, swapped;
  DType type = DType::bf16;
  std::string few_bits = {}, remat = "FULL";

  void trace(Graph& g, ParamTable& params) const {
    const Scope s(g, params, "net",
                  {.weights = type,
                   .activations = type,
                   .remat = remat,
                   .scan_layers = true,
                   .blocks_to_swap = swapped,
                   .few_bits = make_few_bits("base_weights_dtype", few_bits, {})});
    const Tensor x = g.input("x", {type, {rows, width}}, {axis::kBatch, ""});
    const Tensor y = nn::repeat(s / "blocks", kBlocks, x, [this](const Scope& b, Tensor h) {
      const Tensor scale = b.param("scale", {width}, {""}, init::ones());
      const Scope frozen = b.frozen();
      const nn::LinearOptions out{.out = width, .bias = false, .in_axis = axis::kEmbed, .out_axis = axis::kMlp};
      Tensor f = tanh(nn::linear(frozen / "up", h, out));
      return h + nn::linear(frozen / "down", f * scale, out);
    });
    const Tensor loss = mean(square(cast(y, DType::f32)));
    std::vector<Tensor> trained;
    for (const Param& p : params.params())
      if (p.trainable) trained.push_back(p.value);
    g.output("loss", loss);
    int i = 0;
    for (Tensor d : grad(loss, trained)) g.output("d" + std::to_string(i++), d);
  }
};

AheadOfTime compiled(const pjrt::Topology& devices, const Stack& stack, const MeshConfig& config = {}) {
  const Mesh mesh = Mesh::make(config, topology(devices));
  const AxisRules rules = AxisRules::defaults();
  Graph g(graph_options(mesh, topology(devices), &rules));
  ParamTable params;
  stack.trace(g, params);
  return compile_ahead(devices, mesh, g, {}, "swapped blocks");
}

/// Bytes of the matrices of `blocks` blocks.
int64_t matrices(const Stack& stack, int64_t blocks) {
  return blocks * 2 * stack.width * stack.width * static_cast<int64_t>(size_of(stack.type));
}

/// What a stack with swapped blocks takes on one device, next to one without. `bytes_of_block`: of its part there;
/// `least`: of the bytes that loops copy, the part that is copied while something else runs.
void check_swapped(const pjrt::Topology& devices, const Stack& stack, int64_t bytes_of_block,
                   const MeshConfig& mesh = {.ici_data_parallelism = -1}, double least = 1) {
  Stack plain = stack;
  plain.swapped = 0;
  const AheadOfTime all_there = compiled(devices, plain, mesh), streamed = compiled(devices, stack, mesh);
  const MemoryPlan before = all_there.memory.value(), after = streamed.memory.value();
  fmt::print("  arguments {} → {}, temporary {} → {}, of the host {}\n", before.arguments, after.arguments,
             before.temporary, after.temporary, after.host);
  const auto swapped = static_cast<double>(stack.swapped * bytes_of_block);
  EXPECT_EQ(before.host, 0);
  EXPECT_TRUE(all_there.host_copies.empty());
  // The scales are two arrays instead of one, each padded.
  EXPECT_NEAR(static_cast<double>(before.arguments - after.arguments), swapped, 1 << 14);
  EXPECT_EQ(static_cast<double>(after.host), swapped);
  // Of the swapped blocks only a few are on the device at a time: the one that runs, the next, and its arrival.
  EXPECT_LE(after.temporary, before.temporary + 4 * bytes_of_block);
  double copied = 0, overlapped = 0, first = 0;
  for (const pjrt::HostCopy& c : streamed.host_copies) {
    fmt::print("  {} bytes, {:g} times, with {} of other work, after {} products\n", c.bytes, c.times, c.overlapped,
               c.after);
    EXPECT_LE(c.bytes, bytes_of_block);
    copied += c.bytes_of_run();
    if (c.overlapped > 0) overlapped += c.bytes_of_run();
    if (c.times > 1 && c.after == 0) first += c.bytes_of_run();
  }
  // Forward and backward loop: each block once, and one that is not read. Before the loop nothing else runs.
  EXPECT_EQ(copied, static_cast<double>(2 * (stack.swapped + 1) * bytes_of_block));
  EXPECT_GE(overlapped, least * static_cast<double>(2 * stack.swapped * bytes_of_block))
      << "copied while something else runs";
  // A backward step of the GPU reads one of its two matrices first and begins to copy the next one in its place then.
  EXPECT_GE(first, 0.75 * static_cast<double>(2 * stack.swapped * bytes_of_block)) << "copies that begin with the step";
}

const Stack kStack{.rows = 4096, .width = 1024, .swapped = kSwapped};

TEST(SwappedBlocks, OfTpusAreCopiedOneByOneWhileOthersRun) {
  const pjrt::Topology tpus = absent_devices("tpu", "v5p:2x2x1");
  check_swapped(tpus, kStack, matrices(kStack, 1));
}

TEST(SwappedBlocks, OfGpusAreCopiedOneByOneWhileOthersRun) {
  std::string path;
  try {
    path = pjrt::Plugin::find("gpu");
  } catch (const Error&) {
    GTEST_SKIP() << "jax-cuda13-pjrt is not there (cmake/wheels_gpu.txt); blocks are not compiled for GPUs";
  }
  const pjrt::Topology gpus = absent_devices("gpu", "1x1x1", path, 1, "h100");
  check_swapped(gpus, kStack, matrices(kStack, 1));
  Stack all = kStack;
  all.swapped = kBlocks;
  check_swapped(gpus, all, matrices(kStack, 1));
}

TEST(SwappedBlocks, OfAShardedModelAreEachDevicesShards) {
  const MeshConfig sharded{.ici_data_parallelism = 1, .ici_fsdp_parallelism = 4};
  // libtpu waits for one of the four copies of a pair of blocks at once.
  check_swapped(absent_devices("tpu", "v5p:2x2x1"), kStack, matrices(kStack, 1) / 4, sharded, 0.75);
  std::string path;
  try {
    path = pjrt::Plugin::find("gpu");
  } catch (const Error&) {
    GTEST_SKIP() << "jax-cuda13-pjrt is not there (cmake/wheels_gpu.txt); blocks are not compiled for GPUs";
  }
  check_swapped(absent_devices("gpu", "1x1x4", path, 1, "h100"), kStack, matrices(kStack, 1) / 4, sharded);
}

/// Outputs of a program's text on a CPU, without its memory kinds.
std::vector<HostArray> on_cpu(std::string text, const Graph& g, const HostArrays& values) {
  text = std::regex_replace(text, std::regex(R"( \{mhlo.memory_kind = "pinned_host"\})"), "");
  text = std::regex_replace(
      text, std::regex(R"re("stablehlo.custom_call"\((%[0-9#]+)\) \{call_target_name = "annotate[^}]*\}\})re"),
      "\"stablehlo.reshape\"($1)");
  EXPECT_EQ(text.find("annotate"), text.npos);
  const auto client = pjrt::Client::open("cpu", {{"cpu_device_count", int64_t{1}}});
  const int id = client->devices()[0].id;
  const auto program = pjrt::Executable::compile(
      *client, text, {.device_ids = {id}, .flags = {{"xla_backend_optimization_level", "0"}}});
  std::vector<pjrt::Buffer> in;
  std::vector<const pjrt::Buffer*> arguments;
  for (const GraphInput& i : g.inputs()) {
    const HostArray& v = values.at(i.name);
    in.push_back(client->put(id, v.shape(), v.data(), {}, v.owner()));
  }
  for (const pjrt::Buffer& b : in) arguments.push_back(&b);
  std::vector<std::vector<pjrt::Buffer>> out = program.run({arguments});
  std::vector<HostArray> results;
  for (size_t i = 0; i < g.outputs().size(); ++i) {
    HostArray a(g.outputs()[i].value.shape());
    out[0][i].copy_to_host(a.mutable_data(), a.bytes(), a.shape().rank()).wait();
    results.push_back(std::move(a));
  }
  return results;
}

/// Loss, and the gradients of all blocks in order.
std::vector<double> values_of(Platform platform, const Stack& stack) {
  Graph g(GraphOptions{.platform = platform});
  ParamTable params;
  stack.trace(g, params);
  HostArrays values;
  for (const Param& p : params.params())
    if (!p.few_bits) values[p.input] = initial_value(p, 7);
  const ParamTable before = before_few_bits(params, "net");
  if (!stack.few_bits.empty()) {
    HostArrays wide;
    for (const Param& p : before.params()) wide[p.input] = initial_value(p, 7);
    values.merge(few_bits_values(params, "net", wide));
  }
  Param x;
  x.shape = {stack.type, {stack.rows, stack.width}};
  x.input = "x", x.init = init::normal(1);
  values["x"] = initial_value(x, 7);
  std::vector<HostArray> out = on_cpu(to_stablehlo(g), g, values);
  // Two stacks: the scales of the swapped blocks come first in the table, and so do their gradients.
  std::vector<double> all;
  for (const HostArray& a : out)
    for (double v : a.to_doubles()) all.push_back(v);
  return all;
}

TEST(SwappedBlocks, GiveTheLossAndGradientsOfThePlainProgram) {
  for (const char* few_bits : {"", "nf4"})
    for (const char* remat : {"NONE", "FULL"}) {
      if (*few_bits && remat == std::string("NONE")) continue;
      SCOPED_TRACE(fmt::format("{} {}", few_bits, remat));
      Stack stack{.rows = 4, .width = 64, .swapped = 0, .type = DType::f32, .few_bits = few_bits, .remat = remat};
      const std::vector<double> plain = values_of(Platform::cpu, stack);
      ASSERT_EQ(plain.size(), 1U + kBlocks * 64);
      EXPECT_GT(plain[0], 0.1);
      EXPECT_NE(plain[1], 0);
      for (int64_t swapped : {int64_t{1}, kSwapped, kBlocks})
        for (Platform platform : {Platform::gpu, Platform::tpu}) {
          stack.swapped = swapped;
          const std::vector<double> apart = values_of(platform, stack);
          ASSERT_EQ(apart.size(), plain.size());
          for (size_t i = 0; i < plain.size(); ++i) ASSERT_NEAR(apart[i], plain[i], 1e-6 * std::abs(plain[0])) << i;
        }
      stack.swapped = kSwapped;
      EXPECT_EQ(values_of(Platform::cpu, stack), plain) << "a CPU's memory is the host's";
    }
}

}  // namespace
}  // namespace md
