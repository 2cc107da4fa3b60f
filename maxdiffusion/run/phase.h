// A phase of a run: its start, end and duration are logged and, with timing_metrics_file, written to that file.
#pragma once

#include <chrono>
#include <string>

#include "maxdiffusion/settings/run_config.h"

namespace md {

/// The phase lasts as long as the object.
class Phase {
 public:
  Phase(const RunKeys& keys, std::string name);
  Phase(const Phase&) = delete;
  ~Phase();

 private:
  using Clock = std::chrono::steady_clock;
  void tell(const std::string& line);
  std::string name_, file_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace md
