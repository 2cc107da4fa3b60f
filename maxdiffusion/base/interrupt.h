// SIGINT and SIGTERM. A program that calls handle_interrupts() ends by the first one as soon as no file is
// half-written, and where a GracefulStop is alive goes on until that scope has saved what it did. The second one ends
// it at once: files get their names only when they are whole, so what was saved stays. A library without that call is
// not touched. Thread safe.
#pragma once

#include <string>
#include <string_view>

#include "maxdiffusion/base/error.h"

namespace md {

/// Takes over both signals for the whole process; one that is ignored (as by nohup) stays ignored.
void handle_interrupts();
/// The signal that a GracefulStop was told of, or 0.
int interrupt_signal();
/// "SIGINT", "SIGTERM".
const char* interrupt_name();
/// For a program of several processes that stop together: from now on interrupt_signal() is what set_shared_interrupt()
/// was called with, and local_interrupt_signal() what this process alone was told.
void share_interrupts();
int local_interrupt_signal();
void set_shared_interrupt(int signal);
/// Thrown where a signal ends a program; no fault of anybody. apps/main.cc maps it to 128 and the signal's number.
class Interrupted : public Error {
 public:
  explicit Interrupted(std::string message) : Error(Code::internal, std::move(message)) {}
};
/// Throws Interrupted, saying what was being done, where a GracefulStop was told of a signal.
void check_interrupt(std::string_view doing);

/// While one is alive, the first signal only makes interrupt_signal() say so.
class GracefulStop {
 public:
  GracefulStop();
  ~GracefulStop();
  GracefulStop(const GracefulStop&) = delete;
  GracefulStop& operator=(const GracefulStop&) = delete;
};

/// While one is alive, the first signal does not end the process; it ends with the last of them.
class WholeFile {
 public:
  WholeFile();
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
};

}  // namespace md
