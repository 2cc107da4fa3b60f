// SIGINT and SIGTERM. After handle_interrupts(), the first signal ends the program as soon as no file is partly
// written; while a GracefulStop is alive, that scope first saves its work. The second signal ends it at once: files are
// renamed only when complete, so saved files stay. Without that call the library does not change signal handling.
// Thread safe.
#pragma once

#include <string>
#include <string_view>

#include "maxdiffusion/base/error.h"

namespace md {

/// Handles both signals for the whole process; an ignored one (nohup) stays ignored.
void handle_interrupts();
/// The signal received while a GracefulStop was alive, or 0.
int interrupt_signal();
/// "SIGINT", "SIGTERM".
const char* interrupt_name();
/// For several processes that stop together: from now on interrupt_signal() is the argument of set_shared_interrupt(),
/// and local_interrupt_signal() the signal that this process received.
void share_interrupts();
int local_interrupt_signal();
void set_shared_interrupt(int signal);
/// Thrown when a signal ends the program. apps/main.cc maps it to 128 and the signal's number.
class Interrupted : public Error {
 public:
  explicit Interrupted(std::string message) : Error(Code::internal, std::move(message)) {}
};
/// Throws Interrupted, naming the operation, if a signal arrived while a GracefulStop is alive.
void check_interrupt(std::string_view doing);

/// While one is alive, the first signal only sets interrupt_signal(), and prints what the program does before it ends.
class GracefulStop {
 public:
  /// `doing`: a literal.
  explicit GracefulStop(const char* doing = "finishing and saving this step");
  ~GracefulStop();
  GracefulStop(const GracefulStop&) = delete;
  GracefulStop& operator=(const GracefulStop&) = delete;
};

/// While one is alive, the first signal does not end the process; it ends when the last one is destroyed.
class WholeFile {
 public:
  WholeFile();
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
};

}  // namespace md
