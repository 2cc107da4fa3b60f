#include "maxdiffusion/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace md {

int parallel_workers(int64_t n, int most) {
  const int64_t threads = most > 0 ? most : std::thread::hardware_concurrency();
  return static_cast<int>(std::clamp<int64_t>(threads, 1, std::max<int64_t>(n, 1)));
}

void parallel_for(int64_t n, const std::function<void(int64_t, int)>& f, int most) {
  std::atomic<int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&](int worker) {
    try {
      for (int64_t i; (i = next++) < n;) f(i, worker);
    } catch (...) {
      next = n;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int w = 1; w < parallel_workers(n, most); ++w) threads.emplace_back(work, w);
    work(0);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace md
