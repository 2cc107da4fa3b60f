// Logical axes of SDXL's UNet and Wan's transformer under the rules that MaxDiffusion documents for them: every name
// must have a rule, and large parameters must be sharded.
#include <gtest/gtest.h>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/mesh.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

Mesh mesh_of(int64_t data, int64_t fsdp, int64_t tensor, int64_t context = 1) {
  Topology t{.platform = "cpu", .device_kind = "cpu", .devices = {}};
  for (int i = 0; i < data * fsdp * tensor * context; ++i)
    t.devices.push_back({.id = i, .process = 0, .slice = 0, .coords = {}});
  MeshConfig c;
  c.ici_data_parallelism = data;
  c.ici_fsdp_parallelism = fsdp;
  c.ici_tensor_parallelism = tensor;
  c.ici_context_parallelism = context;
  return Mesh::make(c, t);
}

GraphOptions on_mesh(const Mesh& mesh, const AxisRules& rules) {
  GraphOptions options;
  for (const auto& a : mesh.axes()) options.mesh_axes.push_back({a.name, a.size});
  options.resolve = [&](const LogicalAxes& names, const Dims& dims) { return rules.resolve(mesh, names, dims).dims; };
  return options;
}

/// The number of shards of each parameter.
std::map<std::string, int64_t> parts_of(const Graph& g, const ParamTable& table, const Mesh& mesh) {
  std::map<std::string, int64_t> parts;
  for (const GraphInput& in : g.inputs()) {
    const Param* p = table.find(in.name);
    if (!p) continue;
    int64_t& n = parts[p->path] = 1;
    for (const auto& axes : in.sharding)
      for (const auto& a : axes) n *= mesh.size(a);
  }
  return parts;
}

// S1-4, S1-6, S1-23
TEST(UnetLogicalAxes, ShardOverFsdpAndTensor) {
  const Mesh mesh = mesh_of(2, 2, 2);
  const AxisRules rules = AxisRules::defaults();
  Graph g(on_mesh(mesh, rules));
  ParamTable table;
  const auto c = UNetConfig::from_json(parse_json(read_file(golden_path("full/unet_sdxl.json"))));
  // Tracing checks that each name is known, also those of activations.
  unet2d(Scope(g, table, "unet"), c,
         {.sample = g.input("sample", {DType::f32, {8, 16, 16, 4}}),
          .timestep = g.input("t", {DType::f32, {8}}),
          .encoder_hidden_states = g.input("text", {DType::f32, {8, 77, 2048}}),
          .text_embeds = g.input("pooled", {DType::f32, {8, 1280}}),
          .time_ids = g.input("ids", {DType::f32, {8, 6}})});

  int64_t split = 0;
  for (const auto& [path, parts] : parts_of(g, table, mesh)) {
    if (parts > 1) split += table.find("unet/" + path)->shape.elements();
    auto ends = [&path = path](const char* s) { return path.ends_with(s); };
    if (ends("attn1.to_q.weight") || ends("attn2.to_out.0.weight") || ends("ff.net.0.proj.weight") ||
        ends("ff.net.2.weight")) {
      EXPECT_EQ(parts, 4) << path;
    } else if (ends("conv1.weight")) {
      EXPECT_EQ(parts, 2) << path;
    } else if (ends(".bias")) {
      EXPECT_EQ(parts, 1) << path;
    }
  }
  // Not sharded: biases, norms, time embeddings, conv_out.
  EXPECT_GT(static_cast<double>(split) / static_cast<double>(table.count()), 0.95);
}

TEST(WanLogicalAxes, ShardEveryMatrixOfTheBlocks) {
  const Mesh mesh = mesh_of(1, 2, 2, 2);
  const AxisRules rules =
      AxisRules::make({.logical_axis_rules = {kWanAxisRules}, .data_sharding = {}}, MeshConfig().mesh_axes);
  Graph g(on_mesh(mesh, rules));
  ParamTable table;
  const auto c = WanTransformerConfig::from_json(parse_json(read_file(golden_path("full/wan21_i2v_14b.json"))));
  wan_transformer(Scope(g, table, "transformer", {.scan_layers = true}), c,
                  {.sample = g.input("sample", {DType::f32, {2, 2, 8, 12, 36}}),
                   .timestep = g.input("t", {DType::f32, {2}}),
                   .text = g.input("text", {DType::f32, {2, 512, 4096}}),
                   .image = g.input("image", {DType::f32, {2, 257, 1280}})});

  for (const auto& [path, parts] : parts_of(g, table, mesh)) {
    auto has = [&path = path](const char* s) { return path.find(s) != std::string::npos; };
    const bool matrix = path.ends_with(".weight") && !has("norm");
    if (has(".add_k_proj.") || has(".add_v_proj.") || has("patch_embedding") || has("norm_")) {
      EXPECT_EQ(parts, path.ends_with(".weight") ? 2 : 1) << path;  // over tensor, context, tensor
    } else if (has("proj_out")) {
      EXPECT_EQ(parts, matrix ? 4 : 1) << path;
    } else {
      EXPECT_EQ(parts, matrix ? 8 : 1) << path;
    }
  }
}

}  // namespace
}  // namespace md
