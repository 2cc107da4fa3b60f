// Compiles for TPUs and GPUs that this machine does not have. Needs their compilers, which are installed on demand
// only.
#include "maxdiffusion/pjrt/topology.h"

#include <gtest/gtest.h>

#include <tuple>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

/// The product of rows split over four devices with a replicated matrix.
constexpr const char* kProduct =
    R"(module @dot attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func public @main(%x: tensor<1024x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
                         %y: tensor<1024x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>})
      -> (tensor<1024x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
    %z = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<1024x1024xbf16>, tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16>
    return %z : tensor<1024x1024xbf16>
  }
})";

CompileOptions options_for(const Topology& t, std::map<std::string, std::string> flags = {}) {
  CompileOptions options{.device_ids = {}, .flags = std::move(flags)};
  for (const Device& d : t.devices()) options.device_ids.push_back(d.id);
  for (const auto& [flag, value] : t.platform().compile_flags) options.flags.emplace(flag, value);
  return options;
}

/// Path of libtpu; "" if it is not installed.
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
  const Compiled c = t.compile(kProduct, options_for(t));
  ASSERT_TRUE(c.memory());
  EXPECT_EQ(c.memory()->arguments, (1024 * 1024 + 256 * 1024) * 2);
  ASSERT_TRUE(c.flops());
  EXPECT_NEAR(*c.flops(), 2.0 * 256 * 1024 * 1024, 1e7);
}

TEST(Topology, OneThatIsUnknownIsRefusedWithSomeThatAreKnown) {
  if (libtpu().empty()) GTEST_SKIP() << kMissing;
  try {
    Topology::create("tpu", "foo", libtpu());
    FAIL() << "foo is no topology";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_EQ(e.message(), "topology: 'foo' is not a topology of this plugin");
    EXPECT_EQ(e.notes().at(0).find("try: v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x4 or"), 0u) << e.what();
  }
  for (const char* known : {"v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x4"})
    EXPECT_GE(Topology::create("tpu", known, libtpu()).devices().size(), 4u) << known;
}

// S0-2
TEST(Topology, FlagSetsAreKnownToTheCompiler) {
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

std::string gpu_plugin() {
  try {
    return Plugin::find("gpu");
  } catch (const Error&) {
    return "";
  }
}
#define MD_NEEDS_GPU_COMPILER()                                                                   \
  const std::string path = gpu_plugin();                                                          \
  if (path.empty())                                                                               \
  GTEST_SKIP() << "jax-cuda13-pjrt is not there (cmake/wheels_gpu.txt); nothing is compiled for " \
                  "GPUs"

TEST(Topology, CompilesForAbsentGpusOfEveryKind) {
  MD_NEEDS_GPU_COMPILER();
  for (const auto& [card, kind, gigabytes] : {std::tuple{"h100", "NVIDIA H100", 85},
                                              {"h200", "NVIDIA H200", 151},
                                              {"b200", "NVIDIA B200", 192},
                                              {"a100", "NVIDIA A100", 85}}) {
    const Topology t = Topology::create("gpu", "1x1x4", path, 1, card);
    ASSERT_EQ(t.devices().size(), 4u) << card;
    EXPECT_EQ(t.platform_name(), "cuda");
    EXPECT_TRUE(t.devices()[0].kind.starts_with(kind)) << t.devices()[0].kind;
    EXPECT_NEAR(static_cast<double>(t.devices()[0].memory_limit.value()) / 1e9, gigabytes, 1);
    EXPECT_EQ(t.devices()[0].compute_capability, card[0] == 'a' ? 8 : card[0] == 'h' ? 9 : 10);
    const Compiled c = t.compile(kProduct, options_for(t));
    ASSERT_TRUE(c.memory());
    EXPECT_EQ(c.memory()->arguments, (1024 * 1024 + 256 * 1024) * 2);
    ASSERT_TRUE(c.operations());
    EXPECT_TRUE(c.operations()->custom_calls.contains("__cublas$lt$matmul"));
    EXPECT_TRUE(c.operations()->collectives.empty());
  }
}

TEST(Topology, WhichGpusTalkIsReadFromAxesOfTheirMesh) {
  MD_NEEDS_GPU_COMPILER();
  constexpr const char* text =
      R"(module @dot attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "fsdp"=2]>
  func.func public @main(%x: tensor<64x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"fsdp"}]>},
                         %y: tensor<64x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"fsdp"}, {}]>})
      -> (tensor<64x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
    %z = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    return %z : tensor<64x64xf32>
  }
})";
  const Topology t = Topology::create("gpu", "1x1x4", path, 1, "h100");
  const auto found = t.compile(text, options_for(t)).operations().value().collectives;
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].kind, "all-reduce");
  EXPECT_EQ(found[0].groups, (std::vector<std::vector<int64_t>>{{0, 1}, {2, 3}}));
}

TEST(Topology, FlagsForGpusAreTakenAndOthersRefusedByName) {
  MD_NEEDS_GPU_COMPILER();
  const Topology t = Topology::create("gpu", "1x1x4", path, 1, "h100");
  EXPECT_EQ(t.platform().compile_flags.size(), 3u);  // the options that options_for gives
  for (const auto& [flag, value] : {std::pair{"xla_gpu_enable_latency_hiding_scheduler", "True"},
                                    {"xla_gpu_all_gather_combine_threshold_bytes", "134217728"},
                                    {"xla_gpu_exclude_nondeterministic_ops", "False"}})
    EXPECT_TRUE(t.compile(kProduct, options_for(t, {{flag, value}})).memory()) << flag;
  // Of Triton's tiles those for a card that is not attached are not known to be deterministic.
  EXPECT_TRUE(t.compile(kProduct, options_for(t, {{"xla_gpu_enable_triton_gemm", "True"},
                                                  {"xla_gpu_exclude_nondeterministic_ops", "False"}}))
                  .memory());
  // Flags that guides for TPUs recommend.
  for (const auto& [flag, value] : {std::pair{"xla_tpu_scoped_vmem_limit_kib", "65536"},
                                    {"xla_tpu_enable_async_collective_fusion", "True"},
                                    {"xla_enable_async_all_gather", "True"},
                                    {"xla_latency_hiding_scheduler_rerun", "2"},
                                    {"xla_gpu_enable_triton_gemm", "maybe"}})
    try {
      t.compile(kProduct, options_for(t, {{flag, value}}));
      ADD_FAILURE() << flag << " is taken";
    } catch (const Error& e) {
      EXPECT_NE(e.message().find(flag), std::string::npos) << e.message();
    }
}

TEST(Topology, HostsOfUnattachedGpusAreProcesses) {
  MD_NEEDS_GPU_COMPILER();
  const Topology t = Topology::create("gpu", "2x2x4", path, 1, "h100");
  ASSERT_EQ(t.devices().size(), 16u);
  EXPECT_EQ(t.devices()[15].process, 3);
  EXPECT_EQ(t.devices()[15].slice, 1);
}

TEST(Topology, AnUnknownCardIsRefusedWithTheKnown) {
  try {
    Topology::create("gpu", "1x1x8", "", 1, "v100");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_EQ(e.message(), "gpu_type is 'v100'; expected one of: h100, b200, h200, a100");
  }
}

}  // namespace
}  // namespace md::pjrt
