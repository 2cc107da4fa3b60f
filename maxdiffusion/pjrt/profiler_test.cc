#include "maxdiffusion/pjrt/profiler.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "maxdiffusion/base/error.h"

namespace md::pjrt {
namespace {

const std::string kPlugin = MD_TEST_PLUGINS "/profiling.so";
const std::string kSpace("\x0a\x0f\x12\x0d/device:TEST0", 17);

TEST(Profiler, TheCpuPluginHasNone) { EXPECT_EQ(Profiler::start(*Client::open("cpu")), nullptr); }

TEST(Profiler, GivesWhatThePluginRecorded) {
  auto client = Client::open("cpu", {}, kPlugin);
  for (const char* mode : {"", "size", "terminated", "zero"}) {
    setenv("MD_TEST_PROFILER", mode, 1);
    auto p = Profiler::start(*client);
    ASSERT_NE(p, nullptr);
    const std::string expected =
        mode == std::string("zero") ? std::string("\x0a\x0f\x12\x0d/device:TEST\0", 17) : kSpace;
    EXPECT_EQ(p->stop(), expected) << mode;
  }
  unsetenv("MD_TEST_PROFILER");
}

TEST(Profiler, RefusalCarriesThePluginsWords) {
  auto client = Client::open("cpu", {}, kPlugin);
  setenv("MD_TEST_PROFILER", "refuse", 1);
  try {
    Profiler::start(*client);
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::device);
    EXPECT_NE(e.message().find("start: the counters are taken"), std::string::npos) << e.message();
  }
  unsetenv("MD_TEST_PROFILER");
}

}  // namespace
}  // namespace md::pjrt
