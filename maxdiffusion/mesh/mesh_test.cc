#include "maxdiffusion/mesh/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/sharding.h"
#include "maxdiffusion/mesh/torus.h"

namespace md {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Topology devices(int n, int slices = 1) {
  Topology t{.platform = "cpu", .device_kind = "cpu", .devices = {}};
  for (int i = 0; i < n; ++i) t.devices.push_back({.id = i, .process = 0, .slice = i / (n / slices), .coords = {}});
  return t;
}

/// Message and notes of the invalid_config error that `f` throws.
template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// S0-90, S1-2, S1-11, S1-32, S1-40, S2-65
TEST(Mesh, DefaultPutsAllDevicesOnData) {
  const Mesh m = Mesh::make({}, devices(8));
  EXPECT_EQ(m.size("data"), 8);
  EXPECT_EQ(m.size("fsdp"), 1);
  EXPECT_EQ(m.size("no such axis"), 1);
  EXPECT_EQ(m.devices(), 8);
  EXPECT_EQ(m.describe(), "data 8 (8 devices)");
  std::vector<std::string> names;
  for (const MeshAxis& a : m.axes()) names.push_back(a.name);
  EXPECT_THAT(names, ElementsAre("data", "fsdp", "context", "tensor"));
}

TEST(Mesh, FsdpBatchIsAFurtherAxis) {
  const Mesh m =
      Mesh::make({.ici_fsdp_parallelism = 2, .ici_tensor_parallelism = 2, .ici_fsdp_batch_parallelism = 2}, devices(8));
  ASSERT_EQ(m.axes().size(), 5u);
  EXPECT_EQ(m.axes()[2].name, "fsdp_batch");
  EXPECT_EQ(m.size("fsdp_batch"), 2);
  EXPECT_EQ(m.position(5), (std::vector<int64_t>{0, 1, 0, 0, 1}));
  EXPECT_EQ(MeshConfig().axes(), MeshConfig().mesh_axes);
  EXPECT_THAT(refusal([] { Mesh::make({.ici_data_parallelism = 1, .ici_fsdp_batch_parallelism = 3}, devices(8)); }),
              HasSubstr("ici_fsdp_batch_parallelism=3"));
}

TEST(Mesh, SingleIsOneDevice) {
  const Mesh m = Mesh::single();
  EXPECT_EQ(m.devices(), 1);
  EXPECT_EQ(m.describe(), "1 device");
}

// S1-31, S4-67
TEST(Mesh, OneUnspecifiedSizeTakesWhatTheOthersLeave) {
  MeshConfig c;
  c.ici_data_parallelism = 2;
  c.ici_fsdp_parallelism = -1;
  c.ici_tensor_parallelism = 2;
  const Mesh m = Mesh::make(c, devices(8));
  EXPECT_EQ(m.describe(), "data 2 × fsdp 2 × tensor 2 (8 devices)");
  EXPECT_THAT(m.device_ids(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(m.position(5), ElementsAre(1, 0, 0, 1));  // tensor varies fastest
}

// S1-33, S1-52
TEST(Mesh, TwoUnspecifiedSizesAreRefused) {
  MeshConfig c;
  c.ici_fsdp_parallelism = -1;  // data is -1 by default
  const std::string what = refusal([&] { Mesh::make(c, devices(8)); });
  EXPECT_THAT(what, HasSubstr("Found unspecified values (-1) for more than one ICI parallelism axis. At most one axis "
                              "can be unspecified."));
  EXPECT_THAT(what, HasSubstr("ici_data_parallelism=-1, ici_fsdp_parallelism=-1"));
  EXPECT_THAT(what, HasSubstr("try: "));
}

TEST(Mesh, SizesThatDoNotDivideAreRefused) {
  MeshConfig c;
  c.ici_tensor_parallelism = 3;
  const std::string what = refusal([&] { Mesh::make(c, devices(8)); });
  EXPECT_THAT(what, HasSubstr("Unspecified value unable to be determined with the given ICI parallelism values"));
  EXPECT_THAT(what, HasSubstr("divides 8 (3 does not)"));
  c.ici_tensor_parallelism = 16;  // would leave half a device
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(8)); }), HasSubstr("Unspecified value unable to be determined"));
}

// S1-34
TEST(Mesh, AProductOtherThanTheDeviceCountIsRefused) {
  MeshConfig c;
  c.ici_data_parallelism = 2;
  c.ici_tensor_parallelism = 2;
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(8)); }),
              HasSubstr("Number of devices per slice 8 does not match the product of the ICI parallelism 4"));
}

TEST(Mesh, ZeroAndOtherNegativeSizesAreRefused) {
  MeshConfig c;
  c.ici_tensor_parallelism = 0;
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(8)); }), HasSubstr("ici_tensor_parallelism is 0"));
  c.ici_tensor_parallelism = -2;
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(8)); }), HasSubstr("ici_tensor_parallelism is -2"));
}

TEST(Mesh, DcnSizesDoNotMatterOnOneSlice) {
  MeshConfig c;
  c.dcn_data_parallelism = -1;
  c.dcn_fsdp_parallelism = -1;
  c.dcn_tensor_parallelism = 7;
  EXPECT_EQ(Mesh::make(c, devices(4)).describe(), "data 4 (4 devices)");
}

// S1-30, S2-66, S2-69, S4-63, S4-65
TEST(Mesh, SlicesAreTheOuterFactorOfEveryAxis) {
  // The documented example: 4 slices of 8, DCN data 4, ICI data 2 × context 2 × tensor 2.
  MeshConfig c;
  c.dcn_data_parallelism = 4;
  c.ici_data_parallelism = c.ici_context_parallelism = c.ici_tensor_parallelism = 2;
  const Mesh m = Mesh::make(c, devices(32, 4));
  EXPECT_EQ(m.describe(), "data 8 × context 2 × tensor 2 (32 devices)");
  for (int i = 0; i < 32; ++i) EXPECT_EQ(m.device_ids()[static_cast<size_t>(i)], i);

  // Along an inner axis the slices interleave: tensor = DCN 2 × ICI 2 over slices {0…3} and {4…7}.
  MeshConfig t;
  t.dcn_data_parallelism = 1;
  t.dcn_tensor_parallelism = -1;
  t.ici_data_parallelism = t.ici_tensor_parallelism = 2;
  EXPECT_THAT(Mesh::make(t, devices(8, 2)).device_ids(), ElementsAre(0, 1, 4, 5, 2, 3, 6, 7));
}

// S1-33, S2-66, S2-67, S4-63, S4-64
TEST(Mesh, DcnSizesFollowTheSameRules) {
  MeshConfig c;
  c.dcn_fsdp_parallelism = -1;
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(8, 2)); }), HasSubstr("more than one DCN parallelism axis"));
  c.dcn_fsdp_parallelism = 3;
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(8, 2)); }), HasSubstr("with the given DCN parallelism values"));
  c.dcn_data_parallelism = 1;
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(8, 2)); }),
              HasSubstr("Number of slices 2 does not match the product of the DCN parallelism 3"));
}

TEST(Mesh, UnequalSlicesAreRefused) {
  Topology t = devices(4, 2);
  t.devices.pop_back();
  EXPECT_THAT(refusal([&] { Mesh::make({}, t); }), HasSubstr("slice 1 has 1 devices, slice 0 has 2"));
}

// S1-2, S2-65, S4-62
TEST(Mesh, AxisNamesMayBeOmittedOnly) {
  MeshConfig c;
  c.mesh_axes = {"data", "fsdp", "tensor"};
  EXPECT_EQ(Mesh::make(c, devices(4)).axes().size(), 3u);
  c.ici_context_parallelism = 2;
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(4)); }),
              HasSubstr("mesh_axes leaves out 'context', but ici_context_parallelism is 2"));
  c = {};
  c.mesh_axes = {"fsdp", "tensor"};
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(4)); }), HasSubstr("ici_data_parallelism is -1"));
  c.mesh_axes = {"data", "expert"};
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(4)); }),
              HasSubstr("unknown axis 'expert'; expected one of: data, fsdp"));
  c.mesh_axes = {"data", "data"};
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(4)); }), HasSubstr("listed twice"));
  c.mesh_axes = {"tensor", "data", "fsdp", "context"};
  EXPECT_THAT(refusal([&] { Mesh::make(c, devices(4)); }), HasSubstr("out of order"));
}

TEST(Torus, InnermostAxisTakesAPhysicalAxis) {
  std::vector<DeviceInfo> d;  // 4 × 2 grid, ids along y first: neighbours in id are not neighbours along x
  for (int x = 0; x < 4; ++x)
    for (int y = 0; y < 2; ++y) d.push_back({.id = 2 * x + y, .process = 0, .slice = 0, .coords = {x, y, 0}});
  const auto order = torus_order(d, {2, 1, 1, 4}, false);
  EXPECT_THAT(order, ElementsAre(0, 2, 4, 6, 1, 3, 5, 7));  // tensor runs along x
  EXPECT_THAT(torus_order(d, {8, 1, 1, 1}, false).size(), 8u);
}

TEST(Torus, SplittingLetsOneAxisServeTwo) {
  std::vector<DeviceInfo> d;
  for (int x = 0; x < 4; ++x) d.push_back({.id = x, .process = 0, .slice = 0, .coords = {3 - x, 0, 0}});
  EXPECT_THAT(torus_order(d, {2, 1, 1, 2}, false), ElementsAre(0, 1, 2, 3));  // no assignment: id order
  EXPECT_THAT(torus_order(d, {2, 1, 1, 2}, true), ElementsAre(3, 2, 1, 0));   // along the physical links
}

TEST(Torus, EveryDeviceAppearsOnce) {
  std::vector<DeviceInfo> d;
  for (int i = 0; i < 64; ++i) d.push_back({.id = i, .process = 0, .slice = 0, .coords = {i % 4, (i / 4) % 4, i / 16}});
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{4, 4, 1, 4}, {1, 16, 4, 1}, {2, 8, 2, 2}, {64, 1, 1, 1}}) {
    for (bool split : {false, true}) {
      auto order = torus_order(d, sizes, split);
      std::sort(order.begin(), order.end());
      std::vector<int> all(64);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(order, all);
    }
  }
}

TEST(ShardOf, ShardsTileTheArray) {
  MeshConfig c;
  c.ici_data_parallelism = c.ici_fsdp_parallelism = c.ici_tensor_parallelism = 2;
  const Mesh m = Mesh::make(c, devices(8));
  const Sharding s{{{"data", "fsdp"}, {}, {"tensor"}}};
  std::vector<int> hits(96, 0);
  for (int64_t d = 0; d < 8; ++d) {
    const Slice p = shard_of(m, s, {8, 3, 4}, d);
    EXPECT_THAT(p.size, ElementsAre(2, 3, 2));
    for (int64_t i = 0; i < p.size[0]; ++i)
      for (int64_t j = 0; j < p.size[1]; ++j)
        for (int64_t k = 0; k < p.size[2]; ++k)
          ++hits[static_cast<size_t>(((p.start[0] + i) * 3 + p.start[1] + j) * 4 + p.start[2] + k)];
  }
  for (int h : hits) EXPECT_EQ(h, 1);
  EXPECT_THAT(shard_of(m, s, {8, 3, 4}, 5).start, ElementsAre(4, 0, 2));  // data 1, fsdp 0, tensor 1
}

TEST(ShardOf, FirstAxisOfADimIsMajor) {
  MeshConfig c;
  c.ici_data_parallelism = 2;
  c.ici_tensor_parallelism = 2;
  const Mesh m = Mesh::make(c, devices(4));
  EXPECT_THAT(shard_of(m, Sharding{{{"tensor", "data"}}}, {8}, 1).start, ElementsAre(4));  // data 0, tensor 1
}

TEST(ShardOf, ADimThatDoesNotDivideIsNamed) {
  const Mesh m = Mesh::make({}, devices(8));
  EXPECT_THAT(refusal([&] {
                shard_of(m, Sharding{{{}, {"data"}}}, {4, 12}, 0, "unet/conv_in.weight");
              }),
              HasSubstr("unet/conv_in.weight [4,12]: dim 1 of size 12 does not divide into 8 parts (data)"));
  EXPECT_THAT(refusal([&] { shard_of(m, Sharding{{{"expert"}}}, {8}, 0); }), HasSubstr("split over 'expert'"));
  EXPECT_THAT(refusal([&] { shard_of(m, Sharding{{{}, {}}}, {8}, 0); }), HasSubstr("a sharding of 2 dims for 1"));
}

TEST(Sharding, KnowsWhetherItIsReplicated) {
  EXPECT_TRUE(Sharding{}.replicated());
  EXPECT_TRUE((Sharding{{{}, {}}}.replicated()));
  EXPECT_FALSE((Sharding{{{}, {"data"}}}.replicated()));
}

}  // namespace
}  // namespace md
