// The limit on address space (`ulimit -v`), under which many programs crash.
#pragma once

#include <cstdint>
#include <optional>

namespace md {

/// Bytes that this process may still map; none if unlimited.
std::optional<int64_t> address_space_left();
/// If there is a limit: a crash (SIGSEGV, SIGBUS, SIGABRT, SIGILL) reports it, and the exit status is that of
/// out_of_memory.
void explain_crashes_under_a_limit();

}  // namespace md
