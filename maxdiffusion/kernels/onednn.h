// Shared by callers of oneDNN. Every call of oneDNN uses one thread; only the plugin's thread pool divides work among
// threads.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

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

/// Scratch memory, aligned for vectors. Contents are undefined. Thread-local where blocks are small; copies of whole
/// arrays are of one call, whose memory the next one or another phase of the program gets.
class Scratch {
 public:
  float* floats(int64_t n) {
    const auto lines = static_cast<size_t>((n + 15) / 16);
    if (size_ < lines) {
      lines_.reset();
      lines_ = std::make_unique_for_overwrite<Line[]>(lines);
      size_ = lines;
    }
    return lines_ ? lines_[0].values : nullptr;
  }

 private:
  struct alignas(64) Line {
    float values[16];
  };
  std::unique_ptr<Line[]> lines_;
  size_t size_ = 0;
};

}  // namespace md
