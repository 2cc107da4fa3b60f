// Communication in compiled programs is counted by kind and mesh axis, including loop trip counts.
#include "maxdiffusion/runtime/collectives.h"

#include <gtest/gtest.h>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {
namespace {

MeshConfig data_2_fsdp_4() {
  MeshConfig c;
  c.ici_data_parallelism = 2;
  c.ici_fsdp_parallelism = 4;
  return c;
}

const CollectiveSum* find(const std::vector<CollectiveSum>& sums, const std::string& kind,
                          const std::vector<std::string>& axes) {
  for (const CollectiveSum& s : sums)
    if (s.kind == kind && s.axes == axes) return &s;
  std::string all;
  for (const CollectiveSum& s : sums) all += "\n  " + to_string(s);
  ADD_FAILURE() << "no " << kind << " over " << axes.size() << " axes among" << all;
  return nullptr;
}

// S1-38
TEST(Collectives, AreCountedByKindAndAxisWithTheTripsOfLoops) {
  const Devices devices = Devices::open("cpu", 8, data_2_fsdp_4());
  GraphOptions options;
  for (const MeshAxis& a : devices.mesh().axes()) options.mesh_axes.emplace_back(a.name, a.size);
  Graph g(options);
  Tensor x = shard_axes(g.input("x", {DType::f32, {16, 8}}), {{"fsdp"}, {}});
  Tensor y = manual_computation({x}, {{{"fsdp"}, {}}}, {{{"fsdp"}, {}}}, {"data", "fsdp", "context", "tensor"},
                                [](const std::vector<Tensor>& in) {
                                  Tensor c = scan(5, {in[0]}, [](ScanStep&, const std::vector<Tensor>& carry) {
                                               Tensor all = all_gather(carry[0], "fsdp", 0);
                                               return ScanResult{{slice_axis(all * all, 0, 2, 6)}, {}};
                                             }).carry[0];
                                  c = collective_permute(c, "fsdp", 1);
                                  return std::vector<Tensor>{all_reduce_sum(c, {"data"})};
                                })[0];
  g.output("y", y);
  const auto sums = compile_ahead(devices, g, {.jax_cache_dir = "off", .xla_flags = ""}, "collectives").collectives;
  ASSERT_TRUE(sums.has_value());
  if (const CollectiveSum* s = find(*sums, "all-gather", {"fsdp"})) {
    EXPECT_EQ(s->operations, 2) << largest(*s, 4);  // in the loop, and for the result, which every device holds whole
    EXPECT_EQ(s->runs, 6);
    EXPECT_EQ(s->bytes, 6 * 16 * 8 * 4);
    EXPECT_FALSE(s->at_least);
  }
  if (const CollectiveSum* s = find(*sums, "all-reduce", {"data"})) {
    EXPECT_EQ(s->runs, 1);
    EXPECT_EQ(s->bytes, 4 * 8 * 4);
    EXPECT_FALSE(s->between_slices);
  }
  if (const CollectiveSum* s = find(*sums, "collective-permute", {"fsdp"})) {
    EXPECT_EQ(s->bytes, 4 * 8 * 4);
  }
}

TEST(Collectives, BetweenSlicesGoOverTheDataCentreNetwork) {
  Topology two{.platform = "tpu", .device_kind = "", .devices = {}};
  for (int i = 0; i < 8; ++i)
    two.devices.push_back({.id = 100 * (i / 4) + i % 4, .process = 0, .slice = i / 4, .coords = {}});
  MeshConfig c;
  c.ici_fsdp_parallelism = 4;
  c.ici_data_parallelism = 1;
  c.dcn_data_parallelism = 2;
  const Mesh mesh = Mesh::make(c, two);
  const auto sums = sum_collectives({{.kind = "all-reduce", .groups = {{0, 4}, {1, 5}, {2, 6}, {3, 7}}, .bytes = 100},
                                     {.kind = "all-reduce", .groups = {{0, 1, 2, 3}, {4, 5, 6, 7}}, .bytes = 10},
                                     {.kind = "all-reduce", .bytes = 1, .times = 3, .in_unknown_loop = true},
                                     {.kind = "all-reduce", .bytes = 1000, .times = 2, .between_slices = true}},
                                    mesh);
  ASSERT_EQ(sums.size(), 3u);
  EXPECT_EQ(to_string(sums[0]), "all-reduce over data: 2 operations, 3 runs, 0.00 MiB (DCN)");
  EXPECT_EQ(sums[0].bytes, 2100);
  EXPECT_EQ(sums[1].axes, std::vector<std::string>{"fsdp"});
  EXPECT_FALSE(sums[1].between_slices);
  EXPECT_EQ(sums[2].axes, (std::vector<std::string>{"data", "fsdp"}));
  EXPECT_EQ(sums[2].bytes, 3);
  EXPECT_TRUE(sums[2].at_least);
}

}  // namespace
}  // namespace md
