// A phase of a run: its start, end and duration are logged and written to timing_metrics_file.
#pragma once

#include <chrono>
#include <string>

namespace md {

/// The phase lasts as long as the object.
class Phase {
 public:
  /// `file`: timing_metrics_file; empty: none.
  Phase(std::string name, std::string file);
  Phase(const Phase&) = delete;
  ~Phase();

 private:
  using Clock = std::chrono::steady_clock;
  void write(const std::string& line);
  std::string name_, file_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace md
