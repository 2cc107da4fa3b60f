// Finding and opening plugins, and the error messages if that fails.
#include "maxdiffusion/pjrt/plugin.h"
#include "maxdiffusion/pjrt/platforms.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/test_error.h"
#include "maxdiffusion/pjrt/client.h"

namespace md::pjrt {
namespace {

TEST(Plugin, SamePathGivesTheSamePlugin) {
  const std::string path = Plugin::find("cpu");
  auto a = Plugin::load(path), b = Plugin::load(path);
  EXPECT_EQ(a, b);
  EXPECT_EQ(a->api_major(), 0);
  EXPECT_GE(a->api_minor(), 57);
  EXPECT_TRUE(a->attributes().contains("stablehlo_current_version"));
  EXPECT_NE(a, Plugin::load(MD_DEPS_DIR "/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"));
}

TEST(Plugin, MissingOneNamesPlacesAndWheel) {
  setenv("MAXDIFFUSION_PLUGIN_DIR", "/nonexistent/plugins", 1);
  const Error e = error_of([] { Client::open("cpu"); });
  unsetenv("MAXDIFFUSION_PLUGIN_DIR");
  EXPECT_EQ(e.code(), Code::io);
  const std::string text = e.what();
  EXPECT_NE(text.find("/nonexistent/plugins"), text.npos) << text;
  EXPECT_NE(text.find("libpjrt_cpu.so"), text.npos) << text;
  EXPECT_NE(text.find("fastatomstruct-xla-cpu"), text.npos) << text;
  EXPECT_NE(text.find("try: unset MAXDIFFUSION_PLUGIN_DIR, or put "), text.npos) << text;
}

TEST(Plugin, ProcessorsWithoutAvx2TakeThePluginThatRunsOnAll) {
  const bool modern = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const PlatformDef& cpu = platform_for("cpu");
  ASSERT_EQ(cpu.plugin_files.size(), 2u);
  EXPECT_EQ(cpu.lacking(cpu.plugin_files[0]), modern ? "" : "AVX2");
  EXPECT_EQ(cpu.lacking(cpu.plugin_files[1]), "");
  EXPECT_EQ(Plugin::find("cpu").ends_with("/libpjrt_cpu.so"), modern);
}

TEST(Plugin, MissingExplicitPathIsNamed) {
  const Error e = error_of([] { Client::open("cpu", {}, "/nonexistent/x.so"); });
  EXPECT_EQ(e.code(), Code::io);
  EXPECT_NE(e.message().find("/nonexistent/x.so"), std::string::npos);
}

TEST(Plugin, FolderOfPluginsMayBeFlat) {
  setenv("MAXDIFFUSION_PLUGIN_DIR", MD_DEPS_DIR "/xla_plugins/xla_cpu_pjrt", 1);
  const std::string path = Plugin::find("cpu");
  unsetenv("MAXDIFFUSION_PLUGIN_DIR");
  EXPECT_TRUE(path.ends_with("xla_cpu_pjrt.so")) << path;
}

TEST(Plugin, SharedLibraryWithoutTheSymbolIsRefused) {
  const Error e = error_of([] { Plugin::load(MD_TEST_PLUGINS "/not_a_plugin.so"); });
  EXPECT_EQ(e.code(), Code::device);
  EXPECT_NE(e.message().find("GetPjrtApi"), std::string::npos) << e.message();
}

TEST(Plugin, InvalidLibraryIsRefused) {
  const Error e = error_of([] { Plugin::load(MD_SOURCE_DIR "/CMakeLists.txt"); });
  EXPECT_EQ(e.code(), Code::io);
  EXPECT_NE(e.message().find("cannot be loaded"), std::string::npos) << e.message();
}

TEST(Plugin, OldApiIsRefusedWithBothVersions) {
  const Error e = error_of([] { Plugin::load(MD_TEST_PLUGINS "/old_api.so"); });
  EXPECT_EQ(e.code(), Code::device);
  EXPECT_NE(e.message().find("0.29"), std::string::npos) << e.message();
  EXPECT_NE(e.message().find("0.57"), std::string::npos) << e.message();
}

// S4-61
TEST(Plugin, UnknownHardwareListsTheKnown) {
  const Error e = error_of([] { Client::open("abacus"); });
  EXPECT_EQ(e.code(), Code::invalid_config);
  EXPECT_NE(e.message().find("cpu, gpu, tpu"), std::string::npos) << e.message();
}

}  // namespace
}  // namespace md::pjrt
