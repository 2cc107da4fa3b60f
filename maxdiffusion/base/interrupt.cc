#include "maxdiffusion/base/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <initializer_list>

namespace md {
namespace {

// Accessed by a signal handler, so without locks. `local_signal`: the signal that this process received; `shared`: the
// result of interrupt_signal().
std::atomic<int> first_signal = 0, local_signal = 0, shared = 0, graceful = 0, files = 0;
std::atomic<bool> agreed = false;
std::atomic<const char*> what_stops = "";  // of the newest GracefulStop
static_assert(std::atomic<bool>::is_always_lock_free);
static_assert(std::atomic<int>::is_always_lock_free);
static_assert(std::atomic<const char*>::is_always_lock_free);

const char* name_of(int signal) { return signal == SIGINT ? "SIGINT" : "SIGTERM"; }

/// Only calls async-signal-safe functions.
void print(std::initializer_list<std::string_view> parts) {
  for (std::string_view part : parts) [[maybe_unused]] const auto n = ::write(STDERR_FILENO, part.data(), part.size());
}

void handle(int signal) {
  const int error = errno;
  if (first_signal.exchange(signal) != 0) {
    print({name_of(signal), " again: stopped\n"});
    ::_exit(128 + signal);
  }
  if (graceful > 0) {
    local_signal = signal;
    if (!agreed) shared = signal;
    print({name_of(signal), ": ", what_stops.load(), "; send it again to stop at once\n"});
  } else {
    print({"stopped by ", name_of(signal), "\n"});
    if (files == 0) ::_exit(128 + signal);
  }
  errno = error;
}

}  // namespace

void handle_interrupts() {
  for (int signal : {SIGINT, SIGTERM}) {
    struct sigaction before {
    }, now{};
    if (::sigaction(signal, nullptr, &before) != 0 || before.sa_handler == SIG_IGN) continue;
    now.sa_handler = handle;
    now.sa_flags = SA_RESTART;
    ::sigemptyset(&now.sa_mask);
    ::sigaction(signal, &now, nullptr);
  }
}

int interrupt_signal() { return shared; }

void share_interrupts() { agreed = true; }
int local_interrupt_signal() { return local_signal; }
void set_shared_interrupt(int signal) { shared = signal; }

const char* interrupt_name() { return name_of(shared); }

void check_interrupt(std::string_view doing) {
  if (shared != 0) throw Interrupted(fmt::format("stopped by {}: {}", interrupt_name(), doing));
}

GracefulStop::GracefulStop(const char* doing) {
  what_stops = doing;
  ++graceful;
}
GracefulStop::~GracefulStop() { --graceful; }

WholeFile::WholeFile() { ++files; }
WholeFile::~WholeFile() {
  // Handle a signal that arrived meanwhile.
  if (--files == 0 && first_signal != 0 && local_signal == 0) ::_exit(128 + first_signal);
}

}  // namespace md
