// The limit on address space (`ulimit -v`), under which many programs crash.
#pragma once

#include <cstdint>
#include <optional>

namespace md {

/// Bytes of address space that this process may still map; none if unlimited.
std::optional<int64_t> address_space_left();
/// Under such a limit, makes a crash (SIGSEGV, SIGBUS, SIGABRT, SIGILL) report the limit and exit with the status of
/// out_of_memory. No effect if the address space is unlimited.
void explain_crashes_under_a_limit();

}  // namespace md
