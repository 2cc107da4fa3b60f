// One process at a time trains in a run's folder.
#pragma once

#include <chrono>
#include <string>

namespace md {

/// "process 7 on host, started 2026-11-22 12:00:00 UTC".
std::string this_process();

/// Held while the object lives; the kernel releases it however the process ends. The file .lock in the folder says who
/// holds it: process, host and time of the start.
class RunLock {
 public:
  /// Makes the folder. A process that ends, killed perhaps, holds the lock until its memory is given back: where it is
  /// taken, it is waited for. Throws io naming the process that holds the lock then.
  explicit RunLock(const std::string& folder, std::chrono::seconds patience = std::chrono::seconds(10));
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int fd_;
};

}  // namespace md
