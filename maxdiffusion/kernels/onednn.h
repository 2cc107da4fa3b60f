// What callers of oneDNN share. Every call of oneDNN uses one thread; work is divided among threads by the plugin's
// thread pool only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" void omp_set_num_threads(int);

namespace md {

/// Called in each thread before it uses oneDNN, whose loops are OpenMP's.
inline void use_one_thread() { omp_set_num_threads(1); }

/// Memory that a thread keeps for its next call; aligned for vectors. Contents are undefined.
class Scratch {
 public:
  float* floats(int64_t n) {
    const auto lines = static_cast<size_t>((n + 15) / 16);
    if (lines_.size() < lines) lines_ = std::vector<Line>(lines);
    return lines_.empty() ? nullptr : lines_.front().values;
  }

 private:
  struct alignas(64) Line {
    float values[16];
  };
  std::vector<Line> lines_;
};

}  // namespace md
