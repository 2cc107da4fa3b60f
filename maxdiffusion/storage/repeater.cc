#include "maxdiffusion/storage/repeater.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"

namespace md {

struct Repeater::Impl {
  std::string title;
  std::chrono::milliseconds period;
  std::function<bool()> act;
  std::mutex acting, mutex;
  std::condition_variable changed;
  bool poked = false, stopping = false, soon = false;
  std::string told;
  std::thread thread;

  void loop() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait_for(lock, soon ? kSoon : period, [this] { return poked || stopping; });
      if (stopping) return;
      poked = false;
      lock.unlock();
      std::string trouble;
      soon = false;
      try {
        const std::lock_guard one(acting);
        soon = act();
      } catch (const std::exception& e) {
        trouble = e.what();
      }
      if (!trouble.empty() && trouble != told) log_warning("{}: {}; it is tried again", title, trouble);
      told = trouble;
      lock.lock();
    }
  }
};

Repeater::Repeater(std::string title, std::chrono::milliseconds period, std::function<bool()> act)
    : impl_(std::make_unique<Impl>()) {
  impl_->title = std::move(title);
  impl_->period = period;
  impl_->act = std::move(act);
  impl_->thread = std::thread([this] { impl_->loop(); });
}

Repeater::~Repeater() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  impl_->thread.join();
}

void Repeater::poke() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->poked = true;
  }
  impl_->changed.notify_all();
}

void Repeater::now() {
  const std::lock_guard one(impl_->acting);
  impl_->act();
}

void Repeater::between(const std::function<void()>& other) {
  const std::lock_guard one(impl_->acting);
  other();
}

}  // namespace md
