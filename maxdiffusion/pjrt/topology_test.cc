// Compiling for TPUs that are not there. Needs libtpu, which is installed on demand only.
#include "maxdiffusion/pjrt/topology.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"

namespace md::pjrt {
namespace {

TEST(Topology, CompilesForAbsentTpus) {
  std::string path;
  try {
    path = Plugin::find("tpu");
  } catch (const Error& e) {
    GTEST_SKIP() << "libtpu is not installed; set MAXDIFFUSION_PLUGIN_DIR to a folder that has libtpu.so";
  }
  const Topology t = Topology::create("tpu", "v5p:2x2x1", path);
  EXPECT_EQ(t.platform_name(), "tpu");
  ASSERT_EQ(t.devices().size(), 4u);
  for (const Device& d : t.devices()) EXPECT_EQ(d.coords.size(), 3u);
  constexpr const char* text = R"(module @dot attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func public @main(%x: tensor<1024x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
                         %y: tensor<1024x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>})
      -> (tensor<1024x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
    %z = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<1024x1024xbf16>, tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16>
    return %z : tensor<1024x1024xbf16>
  }
})";
  CompileOptions options{.device_ids = {}, .flags = {}};
  for (const Device& d : t.devices()) options.device_ids.push_back(d.id);
  const Compiled c = t.compile(text, options);
  ASSERT_TRUE(c.memory());
  EXPECT_EQ(c.memory()->arguments, (1024 * 1024 + 256 * 1024) * 2);
  ASSERT_TRUE(c.flops());
  EXPECT_NEAR(*c.flops(), 2.0 * 256 * 1024 * 1024, 1e7);
}

}  // namespace
}  // namespace md::pjrt
