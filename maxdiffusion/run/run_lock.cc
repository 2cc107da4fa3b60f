#include "maxdiffusion/run/run_lock.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <thread>
#include <utility>

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

RunLock::RunLock(const std::string& folder, std::chrono::seconds patience, const std::string& key) : folder_(folder) {
  std::error_code ec;
  for (std::filesystem::path at = std::filesystem::absolute(folder); !std::filesystem::exists(at, ec);
       at = at.parent_path())
    made_.push_back(at);
  make_folders(folder);
  if (struct stat s{}; ::stat(folder.c_str(), &s) == 0) identity_.emplace(s.st_dev, s.st_ino);
  const std::string path = folder + "/.lock";
  const auto end = std::chrono::steady_clock::now() + patience;
  const auto locked = [&] {
    if (fd_ < 0) fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    check(fd_ >= 0, Code::io, "open '{}': {}", path, std::strerror(errno));
    return ::flock(fd_, LOCK_EX | LOCK_NB) == 0;
  };
  for (bool waiting = false;;) {
    if (locked()) {
      if (holds_file()) break;
      ::close(std::exchange(fd_, -1));  // the owner has removed the file before it released the lock
      continue;
    }
    const int error = errno;
    if (error != EWOULDBLOCK) {  // the file system does not support locks
      ::close(fd_);
      fd_ = -1;
      log_warning("lock '{}': {}; a second run in this folder is not detected", path, std::strerror(error));
      return;
    }
    if (std::chrono::steady_clock::now() < end) {  // the owner may be exiting
      if (!std::exchange(waiting, true))
        log_info("'{}' is in use; waiting up to {} s for the run there to end", folder, patience.count());
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      continue;
    }
    ::close(fd_);
    std::string other = read_file(path);
    if (other.ends_with('\n')) other.pop_back();
    throw Error(Code::io, fmt::format("'{}' is in use by {}", folder, other.empty() ? "another process" : other))
        .note(fmt::format("try: another {}, or wait until that run has ended", key));
  }
  const std::string text = this_process() + "\n";
  const bool written =
      ::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size());
  if (!written) log_warning("write '{}': {}", path, std::strerror(errno));
}

bool RunLock::holds_file() const {
  struct stat mine {
  }, there{};
  return ::fstat(fd_, &mine) == 0 && ::stat((folder_ + "/.lock").c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
         mine.st_dev == there.st_dev;
}

void RunLock::check_folder() const {
  struct stat now {};
  const bool found = ::stat(folder_.c_str(), &now) == 0;
  if (!found && errno != ENOENT && errno != ENOTDIR)
    return;  // a network file system that does not answer at the moment
  if (found && (!identity_ || *identity_ == std::pair(now.st_dev, now.st_ino))) return;
  if (found && fd_ >= 0 && holds_file()) return;  // a file system that changes the numbers of its folders
  fail(Code::io, "'{}' was deleted or moved while this run wrote to it", folder_);
}

RunLock::~RunLock() {
  if (fd_ < 0) return;
  if (holds_file()) ::unlink((folder_ + "/.lock").c_str());
  for (const std::string& made : made_)
    if (::rmdir(made.c_str()) != 0) break;  // not empty
  ::close(fd_);
}

}  // namespace md
