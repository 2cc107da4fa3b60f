// Resident memory from the kernel, device memory from the plugin.
#include "maxdiffusion/runtime/memory.h"

#include <malloc.h>

#include "maxdiffusion/base/host_memory.h"

// From tcmalloc, if the program links it (cmake/modules.cmake: md_allocator).
extern "C" [[gnu::weak]] void MallocExtension_ReleaseFreeMemory();

namespace md {

MemoryUse memory_use(const Devices& devices) {
  MemoryUse use{.host = status_bytes("VmRSS")};
  const int first = devices.mesh().device_ids()[static_cast<size_t>(devices.local().front())];
  if (auto m = devices.client().memory(first)) {
    use.device_now = m->in_use;
    use.device_peak = m->peak;
    use.device_limit = m->limit;
  }
  return use;
}

void return_freed_memory() {
  if (MallocExtension_ReleaseFreeMemory)
    MallocExtension_ReleaseFreeMemory();
  else
    ::malloc_trim(0);
}

}  // namespace md
