// A phase of a run, told in the log and, where a key asks for it, in a file.
#pragma once

#include <chrono>
#include <string>

#include "maxdiffusion/run/run_config.h"

namespace md {

/// From construction to destruction.
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
