#include "maxdiffusion/probes/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kKept = 4 << 20;

/// Both ends are closed on exec, except the child's copies by dup2.
struct Pipe {
  Pipe() {
    check(::pipe2(ends.data(), O_CLOEXEC) == 0, Code::device, "pipe: {}", std::strerror(errno));
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  }
  ~Pipe() {
    for (int end : ends)
      if (end >= 0) ::close(end);
  }
  Pipe(const Pipe&) = delete;
  void close_writing() {
    ::close(ends[1]);
    ends[1] = -1;
  }
  /// Appends available bytes. Returns false at the end.
  bool read(std::string& text, std::ofstream& log) {
    std::array<char, 1 << 16> bytes{};
    for (;;) {
      const ssize_t n = ::read(ends[0], bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return n < 0 && errno == EAGAIN;
      text.append(bytes.data(), static_cast<size_t>(n));
      if (text.size() > 2 * kKept) text.erase(0, text.size() - kKept);
      if (log.is_open()) log.write(bytes.data(), n).flush();
    }
  }
  std::array<int, 2> ends{};
};

std::vector<std::string> environment_of(const ChildOptions& o) {
  std::vector<std::string> out;
  for (char** v = environ; *v; ++v) {
    const std::string variable = *v, name = variable.substr(0, variable.find('='));
    if (o.environment.contains(name)) continue;
    if (std::ranges::none_of(o.without, [&](const std::string& prefix) { return name.starts_with(prefix); }))
      out.push_back(variable);
  }
  for (const auto& [name, value] : o.environment) out.push_back(name + "=" + value);
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

std::string ChildResult::end() const {
  if (timed_out) return fmt::format("no answer after {:.0f} s", seconds);
  if (signal != 0) return fmt::format("signal {} ({})", signal, strsignal(signal));
  return fmt::format("exit status {}", status);
}

std::string ChildResult::last_words() const {
  const size_t end = err.find_last_not_of(" \n\r\t");
  if (end == err.npos) return "";
  const size_t begin = err.rfind('\n', end);
  return err.substr(begin == err.npos ? 0 : begin + 1, end - (begin == err.npos ? 0 : begin + 1) + 1);
}

std::string this_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

ChildResult run_child(const std::vector<std::string>& words, const ChildOptions& options) {
  std::vector<std::string> all = words, variables = environment_of(options);
  const std::vector<char*> arguments = pointers(all), environment = pointers(variables);
  Pipe out, err;
  std::ofstream log;
  if (!options.log.empty()) {
    log.open(options.log, std::ios::app);
    for (const std::string& word : words) log << word << ' ';
    log << '\n' << std::flush;
  }
  const auto start = Clock::now();
  const pid_t parent = ::getpid(), child = ::fork();
  check(child >= 0, Code::device, "no process could be started: {}", std::strerror(errno));
  if (child == 0) {  // only calls that are safe after fork() in a process with threads
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    const rlimit no_core{0, 0};
    ::setrlimit(RLIMIT_CORE, &no_core);
    const int nothing = ::open("/dev/null", O_RDONLY);
    ::dup2(nothing, STDIN_FILENO);
    ::dup2(out.ends[1], STDOUT_FILENO);
    ::dup2(err.ends[1], STDERR_FILENO);
    ::execve(arguments[0], arguments.data(), environment.data());
    ::dprintf(STDERR_FILENO, "%s cannot be started: %s\n", arguments[0], strerror(errno));
    ::_exit(127);
  }
  ::setpgid(child, child);
  out.close_writing();
  err.close_writing();
  ChildResult r;
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const auto kill_all = [&] { ::kill(-child, SIGKILL); };
  int status = 0;
  rusage used{};
  for (;;) {
    pollfd ends[] = {{out.ends[0], POLLIN, 0}, {err.ends[0], POLLIN, 0}};
    ::poll(ends, 2, 50);
    const bool more_out = out.read(r.out, log), more_err = err.read(r.err, log);
    if (const pid_t ended = ::wait4(child, &status, WNOHANG, &used); ended == child) break;
    if (!r.timed_out && !r.stopped) {
      r.timed_out = elapsed() > options.seconds;
      r.stopped = !r.timed_out && options.enough && options.enough();
      if (r.timed_out || r.stopped) kill_all();
    }
    if (!more_out && !more_err) ::usleep(10'000);  // both are closed, but the child still runs
  }
  kill_all();  // remaining descendants
  out.read(r.out, log);
  err.read(r.err, log);
  r.seconds = elapsed();
  r.peak_bytes = static_cast<int64_t>(used.ru_maxrss) << 10;
  if (WIFEXITED(status))
    r.status = WEXITSTATUS(status);
  else
    r.signal = WTERMSIG(status);
  return r;
}

}  // namespace md
