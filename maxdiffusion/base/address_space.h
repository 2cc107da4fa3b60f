// The limit on address space (`ulimit -v`), under which programs that were never tried with one crash.
#pragma once

#include <cstdint>
#include <optional>

namespace md {

/// Bytes that this process may still map; none: there is no limit.
std::optional<int64_t> address_space_left();
/// Where there is a limit: a crash (SIGSEGV, SIGBUS, SIGABRT, SIGILL) says so, and ends the process with the exit
/// status of out_of_memory. Without one: nothing.
void explain_crashes_under_a_limit();

}  // namespace md
