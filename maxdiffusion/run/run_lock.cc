#include "maxdiffusion/run/run_lock.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"

namespace md {

std::string this_process() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  return fmt::format("process {} on {}, started {:%Y-%m-%d %H:%M:%S} UTC", ::getpid(), host.data(),
                     fmt::gmtime(std::time(nullptr)));
}

RunLock::RunLock(const std::string& folder, std::chrono::seconds patience) {
  make_folders(folder);
  const std::string path = folder + "/.lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  check(fd_ >= 0, Code::io, "open '{}': {}", path, std::strerror(errno));
  const auto end = std::chrono::steady_clock::now() + patience;
  for (bool waiting = false; ::flock(fd_, LOCK_EX | LOCK_NB) != 0; waiting = true) {
    const int error = errno;
    if (error != EWOULDBLOCK) {  // the file system does not support locks
      ::close(fd_);
      fd_ = -1;
      log_warning("lock '{}': {}; a second run in this folder is not detected", path, std::strerror(error));
      return;
    }
    if (std::chrono::steady_clock::now() < end) {  // the owner may be exiting
      if (!waiting) log_info("'{}' is in use; waiting up to {} s for the run there to end", folder, patience.count());
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      continue;
    }
    ::close(fd_);
    std::string other = read_file(path);
    if (other.ends_with('\n')) other.pop_back();
    throw Error(Code::io, fmt::format("'{}' is in use by {}", folder, other.empty() ? "another process" : other))
        .note("try: another run_name, or wait until that run has ended");
  }
  const std::string text = this_process() + "\n";
  const bool written =
      ::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size());
  if (!written) log_warning("write '{}': {}", path, std::strerror(errno));
}

RunLock::~RunLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace md
