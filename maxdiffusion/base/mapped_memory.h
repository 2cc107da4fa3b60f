// Resident pages of memory-mapped files.
#pragma once

#include <cstddef>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Whether these bytes are of a file that map_file mapped. Thread safe.
bool is_mapped(const void* data, size_t bytes);
/// Releases the resident pages of these bytes if is_mapped(); a later read loads them from the file again. No
/// effect on other memory. Thread safe.
void release_pages(const void* data, size_t bytes);

/// a.cast(to), then releases the mapped pages of `a` if the cast made a copy.
HostArray cast_and_release(const HostArray& a, DType to);

}  // namespace md
