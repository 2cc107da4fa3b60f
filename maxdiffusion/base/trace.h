// Time spans by thread, recorded while a profile is active. Otherwise a span costs one load.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace md {

struct TracedSpan {
  const char* name;
  int64_t number;            // −1: none
  int64_t start_ns, end_ns;  // since 1970
};
struct TracedThread {
  int64_t id = 0;  // the system's
  std::string name;
  std::vector<TracedSpan> spans;  // by their ends
  int64_t dropped = 0;            // spans past the first million
};

/// Discards earlier recordings.
void start_tracing();
/// Finished spans that began after start_tracing(), by thread.
std::vector<TracedThread> stop_tracing();

/// Records the time from construction to destruction on this thread. Thread safe.
class Span {
 public:
  /// `name`: a string literal. `number` distinguishes spans of one name.
  explicit Span(const char* name, int64_t number = -1) {
    if (on_.load(std::memory_order_relaxed)) begin(name, number);
  }
  ~Span() {
    if (name_) end();
  }
  Span(const Span&) = delete;

 private:
  friend void start_tracing();
  friend std::vector<TracedThread> stop_tracing();
  void begin(const char* name, int64_t number);
  void end();
  static std::atomic<bool> on_;
  const char* name_ = nullptr;
  int64_t number_ = -1, start_ns_ = 0;
};

}  // namespace md
