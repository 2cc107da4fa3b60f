// A background thread that calls a function periodically.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace md {

/// Thread safe.
class PeriodicThread {
 public:
  /// Calls `act` on a separate thread after every trigger() and every `period`, one call at a time; after kSoon if it
  /// returned true. An exception is logged as a warning with the prefix `title`, unless it repeats the previous one.
  static constexpr std::chrono::milliseconds kSoon{100};
  PeriodicThread(std::string title, std::chrono::milliseconds period, std::function<bool()> act);
  /// Waits for the running call.
  ~PeriodicThread();
  void trigger();
  /// Calls `act` on this thread after the running call; its exceptions propagate.
  void run_now();
  /// Calls `other` on this thread while `act` is not running.
  void while_idle(const std::function<void()>& other);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
