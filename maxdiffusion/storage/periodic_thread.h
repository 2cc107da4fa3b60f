// Something that is done again and again beside the work of the program.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace md {

/// Thread safe.
class PeriodicThread {
 public:
  /// Calls `act` on a thread of its own, after every trigger() and every `period`, never twice at a time, and again
  /// after kSoon where it returns true. What it throws is a warning that begins with `title`, unless the call before
  /// ended with the same words.
  static constexpr std::chrono::milliseconds kSoon{100};
  PeriodicThread(std::string title, std::chrono::milliseconds period, std::function<bool()> act);
  /// Waits for a call that is under way.
  ~PeriodicThread();
  void trigger();
  /// Calls `act` on this thread, when a call that is under way has ended; what it throws comes out.
  void run_now();
  /// Calls something else on this thread, while no call is under way.
  void while_idle(const std::function<void()>& other);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
