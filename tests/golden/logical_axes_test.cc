// Logical axes of SDXL's UNet under the default rules: every name has a rule, and what is large is split.
#include <gtest/gtest.h>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/mesh.h"
#include "maxdiffusion/models/unet2d.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

Mesh mesh_of(int64_t data, int64_t fsdp, int64_t tensor) {
  Topology t{.platform = "cpu", .device_kind = "cpu", .devices = {}};
  for (int i = 0; i < data * fsdp * tensor; ++i) t.devices.push_back({.id = i, .process = 0, .slice = 0, .coords = {}});
  MeshConfig c;
  c.ici_data_parallelism = data;
  c.ici_fsdp_parallelism = fsdp;
  c.ici_tensor_parallelism = tensor;
  return Mesh::make(c, t);
}

TEST(UnetLogicalAxes, SplitAttentionFeedForwardAndConvolutionsOverFsdpAndTensor) {
  const Mesh mesh = mesh_of(2, 2, 2);
  const AxisRules rules = AxisRules::defaults();
  GraphOptions options;
  for (const auto& a : mesh.axes()) options.mesh_axes.push_back({a.name, a.size});
  options.resolve = [&](const LogicalAxes& names, const Dims& dims) { return rules.resolve(mesh, names, dims).dims; };
  Graph g(options);
  ParamTable table;
  const auto c = UNetConfig::from_json(nlohmann::json::parse(read_file(golden_path("full/unet_sdxl.json"))));
  // Tracing alone checks that each name is known, for activations too.
  unet2d(Scope(g, table, "unet"), c,
         {.sample = g.input("sample", {DType::f32, {8, 16, 16, 4}}),
          .timestep = g.input("t", {DType::f32, {8}}),
          .encoder_hidden_states = g.input("text", {DType::f32, {8, 77, 2048}}),
          .text_embeds = g.input("pooled", {DType::f32, {8, 1280}}),
          .time_ids = g.input("ids", {DType::f32, {8, 6}})});

  int64_t split = 0;
  for (const GraphInput& in : g.inputs()) {
    const Param* p = table.find(in.name);
    if (!p) continue;
    int64_t parts = 1;
    for (const auto& axes : in.sharding)
      for (const auto& a : axes) parts *= mesh.size(a);
    if (parts > 1) split += p->shape.elements();
    auto ends = [&](const char* s) { return p->path.ends_with(s); };
    if (ends("attn1.to_q.weight") || ends("attn2.to_out.0.weight") || ends("ff.net.0.proj.weight") ||
        ends("ff.net.2.weight")) {
      EXPECT_EQ(parts, 4) << p->path;
    } else if (ends("conv1.weight")) {
      EXPECT_EQ(parts, 2) << p->path;
    } else if (ends(".bias")) {
      EXPECT_EQ(parts, 1) << p->path;
    }
  }
  // The rest: biases, norms, time embeddings, conv_out.
  EXPECT_GT(static_cast<double>(split) / static_cast<double>(table.count()), 0.95);
}

}  // namespace
}  // namespace md
