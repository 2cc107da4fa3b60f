// A copy of the CPU plugin's function table, for test plugins that replace some of its functions.
#pragma once

#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <vector>

/// The bytes of the table, which may be newer than this header and longer than PJRT_Api.
inline std::vector<char> cpu_plugin_copy() {
  void* library = dlopen(MD_DEPS_DIR "/fastatomstruct_xla_cpu/libpjrt_cpu.so", RTLD_NOW | RTLD_LOCAL);
  const auto* real = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
  return {reinterpret_cast<const char*>(real), reinterpret_cast<const char*>(real) + real->struct_size};
}
