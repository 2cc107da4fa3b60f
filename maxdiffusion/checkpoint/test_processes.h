// For tests: the processes that write a checkpoint together, as threads of one process.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/checkpoint/checkpoint.h"

namespace md {

/// A barrier where threads exchange texts; it throws in all others once one thread has left.
class Meeting {
 public:
  explicit Meeting(int64_t n) : texts_(static_cast<size_t>(n)) {}
  std::vector<std::string> gather(int64_t p, const std::string& mine) {
    std::unique_lock lock(mutex_);
    const int64_t round = round_;
    texts_[static_cast<size_t>(p)] = mine;
    if (++here_ == std::ssize(texts_)) {
      here_ = 0, ++round_;
      previous_ = texts_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round || gone_; });
    check(round_ != round, Code::device, "gather: a process is gone");
    return p == 0 ? previous_ : std::vector<std::string>{previous_[0]};
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    changed_.notify_all();
  }
  void put(const std::string& key, const std::string& value) {
    const std::lock_guard lock(mutex_);
    check(values_.emplace(key, value).second, Code::internal, "'{}' is put twice", key);
  }
  std::optional<std::string> get(const std::string& key) {
    const std::lock_guard lock(mutex_);
    check(!gone_, Code::device, "get: a process is gone");
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  int64_t here_ = 0, round_ = 0;
  bool gone_ = false;
  std::vector<std::string> texts_, previous_;  // of this round, and of the previous one
  std::map<std::string, std::string> values_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

using Act = std::function<void(const CheckpointProcesses&)>;
/// Runs `act` in n threads; returns each one's error message, "" if it threw none.
inline std::vector<std::string> as_processes(int64_t n, const Act& act) {
  Meeting meeting(n);
  std::vector<std::string> errors(static_cast<size_t>(n));
  std::vector<std::jthread> threads;
  for (int64_t p = 0; p < n; ++p)
    threads.emplace_back([&, p] {
      try {
        act({.process = p,
             .processes = n,
             .gather = [&meeting, p](const std::string& mine) { return meeting.gather(p, mine); },
             .put = [&meeting](const std::string& key, const std::string& value) { meeting.put(key, value); },
             .get = [&meeting](const std::string& key) { return meeting.get(key); }});
      } catch (const Error& e) {
        errors[static_cast<size_t>(p)] = e.what();
        meeting.leave();
      }
    });
  threads.clear();
  return errors;
}

}  // namespace md
