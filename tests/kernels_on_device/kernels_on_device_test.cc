// Every operation of tile programs and every attention kernel, with values, on this machine's accelerator.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "maxdiffusion/pjrt/platforms.h"

namespace md {
namespace {

TEST(KernelsOnDevice, HaveTheirValues) {
  std::string hardware;
  if (const char* requested = std::getenv("MD_TEST_HARDWARE"); requested) hardware = requested;
  for (const char* candidate : {"tpu", "gpu"})
    if (hardware.empty() && pjrt::platform_for(candidate).absent("").empty()) hardware = candidate;
  if (hardware.empty())
    GTEST_SKIP() << "this processor has no accelerator: no kernel runs, tests.tiles has their StableHLO";
  // Operations first: their tests name the wrong operation, while a kernel's test only fails.
  for (const char* tests : {"TileOperations.*-*CompileForEveryTpu", "TileAttention.IsAttention"}) {
    const std::string command = "MD_TEST_HARDWARE=" + hardware +
                                " '" MD_BINARY_DIR "/tiles_tests' --gtest_brief=1 --gtest_filter='" + tests + "'";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }
}

}  // namespace
}  // namespace md
