#include "maxdiffusion/base/trace.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <mutex>

namespace md {
namespace {

constexpr size_t kMostSpans = 1 << 20;  // of a thread: 32 MiB

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

struct Recording {
  std::mutex mutex;
  TracedThread thread;
};

/// Recordings of the active profile, including those of threads that have ended.
struct Profile {
  std::mutex mutex;
  std::vector<std::shared_ptr<Recording>> recordings;
  std::atomic<int64_t> started_ns = 0;
};

Profile& profile() {
  static Profile* p = new Profile;  // threads may outlive static objects
  return *p;
}

Recording& recording() {
  thread_local std::shared_ptr<Recording> mine;
  thread_local int64_t of_profile = 0;
  Profile& p = profile();
  if (const int64_t started = p.started_ns; !mine || of_profile != started) {
    mine = std::make_shared<Recording>();
    of_profile = started;
    mine->thread.id = ::syscall(SYS_gettid);
    char name[32] = "";
    ::pthread_getname_np(::pthread_self(), name, sizeof name);
    mine->thread.name = name;
    std::lock_guard lock(p.mutex);
    p.recordings.push_back(mine);
  }
  return *mine;
}

}  // namespace

std::atomic<bool> Span::on_ = false;

void start_tracing() {
  Profile& p = profile();
  std::lock_guard lock(p.mutex);
  p.recordings.clear();
  p.started_ns = now_ns();
  Span::on_ = true;
}

std::vector<TracedThread> stop_tracing() {
  Span::on_ = false;
  Profile& p = profile();
  std::lock_guard lock(p.mutex);
  std::vector<TracedThread> threads;
  for (const auto& r : p.recordings) {
    std::lock_guard one(r->mutex);
    threads.push_back(std::move(r->thread));
  }
  p.recordings.clear();
  return threads;
}

void Span::begin(const char* name, int64_t number) {
  name_ = name;
  number_ = number;
  start_ns_ = now_ns();
}

void Span::end() {
  if (!on_ || start_ns_ < profile().started_ns) return;
  Recording& r = recording();
  std::lock_guard lock(r.mutex);
  if (r.thread.spans.size() < kMostSpans)
    r.thread.spans.push_back({name_, number_, start_ns_, now_ns()});
  else
    ++r.thread.dropped;
}

}  // namespace md
