// The program: runs the command that its arguments name. The only place that catches errors.
#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>

#include "maxdiffusion/base/address_space.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/exit_status.h"
#include "maxdiffusion/base/file_errors.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/storage/storage.h"

namespace {

/// The error if standard output cannot be written.
md::Error output_error(int error) {
  return {md::Code::io, fmt::format("standard output cannot be written: {}", std::strerror(error))};
}

/// Prints one message with its notes; returns the exit status.
int report(const md::Error& e) {
  fmt::print(stderr, "{}error: {}\n", md::log_prefix(), e.message());
  for (const auto& note : e.notes()) fmt::print(stderr, "  {}\n", note);
  if (e.code() == md::Code::internal) {
    fmt::print(stderr, "  this is a defect of the program\n");
  }
  return md::exit_status(e.code());
}

/// Notifies the other processes of the job, however the program ends.
struct Leave {
  ~Leave() { md::leave_processes(false); }
};

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_DFL);  // `maxdiffusion inspect … | head` ends quietly
  std::signal(SIGXFSZ, SIG_IGN);  // a file larger than `ulimit -f` becomes an error with a message
  if (const char* level = std::getenv("MAXDIFFUSION_LOG"); level && level == std::string_view("debug"))
    md::set_log_level(md::LogLevel::debug);
  md::handle_interrupts();
  md::explain_crashes_under_a_limit();
  const md::RemoteScope remote;
  const Leave leave;
  try {
    md::run_command({argv + 1, argv + argc});
    if (std::fflush(stdout) != 0) throw output_error(errno);
    md::leave_processes(true);
    return 0;
  } catch (const md::Interrupted& e) {
    if (md::processes().is_coordinator()) fmt::print(stderr, "{}\n", e.what());
    md::leave_processes(true);
    return 128 + md::interrupt_signal();
  } catch (const md::Error& e) {
    return report(e);
  } catch (const std::bad_alloc&) {
    return report({md::Code::out_of_memory, "the host's memory is used up"});
  } catch (const std::filesystem::filesystem_error& e) {
    return report(md::io_error("look at", e.path1(), e.code().value()));
  } catch (const std::system_error& e) {  // from fmt::print, or a thread without memory for its stack
    if (std::ferror(stdout)) return report(output_error(e.code().value()));
    if (e.code() == std::errc::too_many_files_open)
      return report(
          md::Error(md::Code::io, e.what()).note("try: a larger limit on open files (ulimit -n 4096), then run again"));
    if (e.code() != std::errc::resource_unavailable_try_again) return report({md::Code::internal, e.what()});
    return report(md::Error(md::Code::out_of_memory, "no thread could be started")
                      .note("try: a larger limit on address space (ulimit -v) or on processes (ulimit -u)"));
  } catch (const std::exception& e) {
    return report({md::Code::internal, e.what()});
  } catch (...) {  // from a plugin with another standard library, if it has no memory
    return report({md::Code::out_of_memory, "a plugin has thrown an exception of its own, as where memory is used up"});
  }
}
