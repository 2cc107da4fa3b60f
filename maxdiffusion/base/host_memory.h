// Limits and use of the host's memory, and sizes of memory as text.
#pragma once

#include <cstdint>
#include <string>

namespace md {

/// Bytes that this process may use: the machine's memory, or the limit of a cgroup or of `ulimit -v` if smaller.
int64_t memory_limit();
/// Bytes that this process may still allocate within these limits. The page cache counts as free.
int64_t free_memory();
/// A field of /proc/self/status that is given in kB ("VmRSS", "VmHWM", "VmSize"), in bytes; 0 if it is missing.
int64_t status_bytes(const std::string& field);
/// "512.0 MiB", "13.75 GiB".
std::string bytes_text(int64_t bytes);

}  // namespace md
