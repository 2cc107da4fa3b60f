// What of mapped files lies in this process's memory, and counts for it.
#pragma once

#include <cstddef>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Gives these bytes' pages back where they are of a file that map_file mapped: whoever reads them again gets them from
/// the file. Other memory stays as it is. Thread safe.
void release_pages(const void* data, size_t bytes);

/// a.cast(to) of an array that nobody reads soon again: a copy leaves none of a mapped file behind.
HostArray cast_and_release(const HostArray& a, DType to);

}  // namespace md
