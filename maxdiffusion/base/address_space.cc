#include "maxdiffusion/base/address_space.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <string_view>

#include "maxdiffusion/base/exit_status.h"

namespace md {
namespace {

std::optional<int64_t> limit() {
  rlimit allowed{};
  if (::getrlimit(RLIMIT_AS, &allowed) != 0 || allowed.rlim_cur == RLIM_INFINITY) return {};
  return static_cast<int64_t>(allowed.rlim_cur);
}

/// Only calls async-signal-safe functions.
void print_and_exit(int) {
  constexpr std::string_view kText =
      "error: the program crashed under a limit on its address space (ulimit -v); what gets no memory may crash\n"
      "  try: ulimit -v unlimited\n";
  [[maybe_unused]] const auto n = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(exit_status(Code::out_of_memory));
}

}  // namespace

std::optional<int64_t> address_space_left() {
  const std::optional<int64_t> most = limit();
  if (!most) return {};
  int64_t pages = 0;
  if (FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%ld", &pages) != 1) pages = 0;
    std::fclose(f);
  }
  return std::max<int64_t>(*most - pages * ::sysconf(_SC_PAGESIZE), 0);
}

void explain_crashes_under_a_limit() {
  if (!limit()) return;
  struct sigaction act {};
  act.sa_handler = print_and_exit;
  ::sigemptyset(&act.sa_mask);
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGILL}) ::sigaction(signal, &act, nullptr);
}

}  // namespace md
