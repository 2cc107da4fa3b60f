// How much memory is in use, for benchmarks and metrics.
#pragma once

#include <cstdint>
#include <optional>

#include "maxdiffusion/runtime/runtime.h"

namespace md {

/// Bytes. `host_*` are this process's resident memory (on CPU it holds the arrays too); `device_*` come from the
/// allocator of the first device of this process, where the plugin counts.
struct MemoryUse {
  int64_t host_now = 0, host_peak = 0;
  std::optional<int64_t> device_now, device_peak, device_limit;
};
MemoryUse memory_use(const Devices& devices);

/// Gives back to the system what was freed, where the allocator keeps it for later: called when something large goes
/// and what follows needs the memory elsewhere. Thread safe.
void return_freed_memory();

}  // namespace md
