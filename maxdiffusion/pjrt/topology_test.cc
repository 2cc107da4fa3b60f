// Compiling for TPUs that are not there. Needs libtpu, which is installed on demand only.
#include "maxdiffusion/pjrt/topology.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

/// Where libtpu is; "" where it is not.
std::string libtpu() {
  try {
    return Plugin::find("tpu");
  } catch (const Error&) {
    return "";
  }
}
constexpr const char* kMissing = "libtpu is not installed; set MAXDIFFUSION_PLUGIN_DIR to a folder that has libtpu.so";

TEST(Topology, CompilesForAbsentTpus) {
  if (libtpu().empty()) GTEST_SKIP() << kMissing;
  const Topology t = Topology::create("tpu", "v5p:2x2x1", libtpu());
  EXPECT_FALSE(t.platform_version().empty());
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

TEST(Topology, TheCompilerKnowsEveryFlagOfTheSetsAndNamesOthers) {
  if (libtpu().empty()) GTEST_SKIP() << kMissing;
  const Topology t = Topology::create("tpu", "v5p:2x2x1", libtpu());
  constexpr const char* text = R"(module @one {
  func.func public @main(%x: tensor<8x128xf32>) -> tensor<8x128xf32> {
    %y = stablehlo.add %x, %x : tensor<8x128xf32>
    return %y : tensor<8x128xf32>
  }
})";
  ASSERT_EQ(t.platform().flag_sets.size(), 4U);
  EXPECT_EQ(t.platform().flag_sets[0].flags.size(), 25U);
  for (const FlagSet& set : t.platform().flag_sets) {
    CompileOptions options{.device_ids = {t.devices()[0].id}, .flags = {}};
    options.flags.insert(set.flags.begin(), set.flags.end());
    EXPECT_NO_THROW(t.compile(text, options)) << set.name;
  }
  try {
    t.compile(text, {.device_ids = {t.devices()[0].id}, .flags = {{"xla_tpu_no_such_flag", "true"}}});
    ADD_FAILURE() << "an unknown flag was taken";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("xla_tpu_no_such_flag"), std::string::npos) << e.message();
  }
}

}  // namespace
}  // namespace md::pjrt
