// The CPU plugin, except that running a program throws, as the CUDA plugin does when an operation of a program fails.
#include <stdexcept>
#include <vector>

#include "tests/plugins/cpu_plugin_copy.h"

extern "C" const PJRT_Api* GetPjrtApi() {
  static std::vector<char> copy = [] {
    std::vector<char> bytes = cpu_plugin_copy();
    reinterpret_cast<PJRT_Api*>(bytes.data())->PJRT_LoadedExecutable_Execute =
        [](PJRT_LoadedExecutable_Execute_Args*) -> PJRT_Error* { throw std::out_of_range("hash_map::at"); };
    return bytes;
  }();
  return reinterpret_cast<const PJRT_Api*>(copy.data());
}
