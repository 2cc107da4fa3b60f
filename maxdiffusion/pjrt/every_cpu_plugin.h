// For tests only: a fixture whose tests run on both CPU plugins.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "maxdiffusion/pjrt/client.h"

namespace md::pjrt {

class EveryCpuPlugin : public testing::TestWithParam<const char*> {
 protected:
  static std::string path() { return std::string(MD_DEPS_DIR) + GetParam(); }
  static std::shared_ptr<Client> open(int64_t devices = 1) {
    return Client::open("cpu", {{"cpu_device_count", devices}}, path());
  }
};

#define MD_ON_EVERY_CPU_PLUGIN(suite)                                                                                  \
  INSTANTIATE_TEST_SUITE_P(                                                                                            \
      , suite, testing::Values("/fastatomstruct_xla_cpu/libpjrt_cpu.so", "/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"), \
      [](const auto& info) { return info.index == 0 ? "Default" : "Second"; })

}  // namespace md::pjrt
