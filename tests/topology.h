// Topologies of TPUs and GPUs that this machine does not have, for tests.
#pragma once

#include <cstdlib>
#include <string>

#include "maxdiffusion/pjrt/topology.h"

namespace md {

/// Calls pjrt::Topology::create without the flags that ctest sets for the CPU plugin (PLAIN_PROGRAMS,
/// cmake/modules.cmake): they are fatal to other plugins, which read the same variable when they open.
template <typename... Options>
pjrt::Topology absent_devices(const std::string& platform, const std::string& name, const Options&... options) {
  ::unsetenv("XLA_FLAGS");
  return pjrt::Topology::create(platform, name, options...);
}

}  // namespace md
