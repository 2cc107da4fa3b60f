// For tests: the processes that write a checkpoint together, as threads of one process.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/checkpoint/checkpoint.h"

namespace md {

/// Where threads wait for each other; broken once one has left.
class Meeting {
 public:
  explicit Meeting(int64_t n) : n_(n) {}
  void arrive() {
    std::unique_lock lock(mutex_);
    const int64_t round = round_;
    if (++here_ == n_) {
      here_ = 0, ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round || gone_; });
    check(round_ != round, Code::device, "barrier: a process is gone");
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    changed_.notify_all();
  }

 private:
  const int64_t n_;
  int64_t here_ = 0, round_ = 0;
  bool gone_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
};

using Act = std::function<void(const CheckpointProcesses&)>;
/// What each process threw, "" for nothing.
inline std::vector<std::string> as_processes(int64_t n, const Act& act) {
  Meeting meeting(n);
  std::vector<std::string> errors(static_cast<size_t>(n));
  std::vector<std::jthread> threads;
  for (int64_t p = 0; p < n; ++p)
    threads.emplace_back([&, p] {
      try {
        act({p, n, [&] { meeting.arrive(); }});
      } catch (const Error& e) {
        errors[static_cast<size_t>(p)] = e.what();
        meeting.leave();
      }
    });
  threads.clear();
  return errors;
}

}  // namespace md
