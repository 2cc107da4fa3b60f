// The host's memory: what this process may have, and what of it is free.
#pragma once

#include <cstdint>
#include <string>

namespace md {

/// Bytes that this process may have: the machine's memory, or less by a cgroup or by `ulimit -v`.
int64_t memory_limit();
/// Bytes that this process may still take before it meets one of these limits. What the system keeps of files does not
/// count as taken.
int64_t free_memory();
/// A field of /proc/self/status that is given in kB ("VmRSS", "VmHWM", "VmSize"), as bytes; 0: there is none.
int64_t status_bytes(const std::string& field);

}  // namespace md
