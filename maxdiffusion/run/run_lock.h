// Lock of a run's folder: only one process trains there at a time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace md {

/// "process 7 on host, started 2026-11-22 12:00:00 UTC".
std::string this_process();

/// Held during the object's lifetime; the kernel releases it however the process ends. The file .lock in the folder has
/// the owner's process, host and start time; the destructor removes it, and the folders that the lock made if they are
/// still empty.
class RunLock {
 public:
  /// Creates the folder. If the lock is held, waits up to `patience`: a killed process holds it until its memory is
  /// freed. Throws io naming the owner, and `key`, which names the folder.
  explicit RunLock(const std::string& folder, std::chrono::seconds patience = std::chrono::seconds(10),
                   const std::string& key = "run_name");
  ~RunLock();
  /// Throws io, naming the folder, if it was deleted or moved meanwhile.
  void check_folder() const;
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  /// Whether the file of the lock is still the one that is locked.
  bool holds_file() const;

  std::string folder_;
  std::optional<std::pair<dev_t, ino_t>> identity_;  // of the folder
  std::vector<std::string> made_;                    // folders that did not exist, the innermost first
  int fd_ = -1;
};

}  // namespace md
