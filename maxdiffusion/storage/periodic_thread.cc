#include "maxdiffusion/storage/periodic_thread.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"

namespace md {

struct PeriodicThread::Impl {
  std::string title;
  std::chrono::milliseconds period;
  std::function<bool()> act;
  std::mutex acting, mutex;
  std::condition_variable changed;
  bool triggered = false, stopping = false, soon = false;
  std::string reported;
  std::thread thread;

  void loop() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait_for(lock, soon ? kSoon : period, [this] { return triggered || stopping; });
      if (stopping) return;
      triggered = false;
      lock.unlock();
      std::string error;
      soon = false;
      try {
        const std::lock_guard one(acting);
        soon = act();
      } catch (const std::exception& e) {
        error = e.what();
      }
      if (!error.empty() && error != reported) log_warning("{}: {}; retrying", title, error);
      reported = error;
      lock.lock();
    }
  }
};

PeriodicThread::PeriodicThread(std::string title, std::chrono::milliseconds period, std::function<bool()> act)
    : impl_(std::make_unique<Impl>()) {
  impl_->title = std::move(title);
  impl_->period = period;
  impl_->act = std::move(act);
  impl_->thread = std::thread([this] { impl_->loop(); });
}

PeriodicThread::~PeriodicThread() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  impl_->thread.join();
}

void PeriodicThread::trigger() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->triggered = true;
  }
  impl_->changed.notify_all();
}

void PeriodicThread::run_now() {
  const std::lock_guard one(impl_->acting);
  impl_->act();
}

void PeriodicThread::while_idle(const std::function<void()>& other) {
  const std::lock_guard one(impl_->acting);
  other();
}

}  // namespace md
