// A loop over chunks on the plugin's thread pool. The caller takes part, so it never waits for a free thread.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace md {

inline void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// body(i) for i in [0, n), in any order, on any thread; returns when all are done. `body` must not throw.
inline void parallel_for(xla::ffi::ThreadPool& pool, int64_t n, const std::function<void(int64_t)>& body) {
  struct Shared {
    std::function<void(int64_t)> body;  // a copy: a late thread may read it after the caller returned
    int64_t n;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
    void work() {
      for (int64_t i; (i = next.fetch_add(1)) < n;) {
        body(i);
        if (done.fetch_add(1) + 1 == n) {
          std::lock_guard lock(mutex);
          finished.notify_all();
        }
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->body = body;
  shared->n = n;
  const int64_t helpers = std::min(pool.num_threads(), n) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->work(); });
  shared->work();
  // Each other thread is at its last chunk: most finish before a thread could sleep and wake up.
  constexpr int kSpins = 2000;  // tens of µs
  for (int i = 0; i < kSpins; ++i) {
    if (shared->done.load() == n) return;
    pause_processor();
  }
  std::unique_lock lock(shared->mutex);
  shared->finished.wait(lock, [&] { return shared->done.load() == n; });
}

}  // namespace md
