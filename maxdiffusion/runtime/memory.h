// Memory in use, for benchmarks and metrics.
#pragma once

#include <cstdint>
#include <optional>

#include "maxdiffusion/runtime/runtime.h"

namespace md {

/// Bytes. `host` is this process's resident memory (on CPU including arrays); `device_*` come from the allocator of
/// the first device of this process, if the plugin reports them.
struct MemoryUse {
  int64_t host = 0;
  std::optional<int64_t> device_now, device_peak, device_limit;
};
MemoryUse memory_use(const Devices& devices);

/// Returns freed memory from the allocator to the system; called after large arrays are freed. Thread safe.
void return_freed_memory();

}  // namespace md
