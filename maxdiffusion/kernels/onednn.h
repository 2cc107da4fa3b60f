// Shared by callers of oneDNN. Every call of oneDNN uses one thread; only the plugin's thread pool divides work among
// threads.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

extern "C" void omp_set_num_threads(int);

namespace md {

/// Call in each thread before it uses oneDNN, whose loops use OpenMP.
inline void use_one_thread() { omp_set_num_threads(1); }

inline dnnl::engine& onednn_engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

/// The result of `compile` for a problem, cached per process. Thread safe.
template <class Problem, class Code>
const Code& compiled(const Problem& p, Code (*compile)(const Problem&)) {
  static std::mutex mutex;
  static std::map<Problem, Code> codes;  // references to entries stay valid
  use_one_thread();
  std::lock_guard lock(mutex);
  auto found = codes.find(p);
  if (found == codes.end()) found = codes.emplace(p, compile(p)).first;
  return found->second;
}

inline int64_t floats_in(const dnnl::memory::desc& d) {
  return static_cast<int64_t>((d.get_size() + sizeof(float) - 1) / sizeof(float));
}

/// Thread-local scratch memory, aligned for vectors. Contents are undefined.
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
