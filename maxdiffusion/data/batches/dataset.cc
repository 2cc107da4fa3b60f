#include "maxdiffusion/data/batches/dataset.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {
namespace {

class InMemory final : public Examples {
 public:
  explicit InMemory(HostArrays arrays) : arrays_(std::move(arrays)) {
    check(!arrays_.empty(), Code::internal, "in_memory: no arrays");
    const auto& [first, array] = *arrays_.begin();
    for (const auto& [name, a] : arrays_) {
      check(a.shape().rank() > 0 && a.dims()[0] > 0 && array.shape().rank() > 0 && a.dims()[0] == array.dims()[0],
            Code::internal, "in_memory: '{}' is {}, '{}' is {}: axis 0 must be the same number of samples, > 0", first,
            to_string(array.shape()), name, to_string(a.shape()));
    }
  }
  int64_t size() const override { return arrays_.begin()->second.dims()[0]; }
  HostArrays read(const ExampleRef& which) const override {
    HostArrays out;
    for (const auto& [name, a] : arrays_) out.emplace(name, row_of(a, which.index));
    return out;
  }

 private:
  HostArrays arrays_;
};

class ExampleBatches final : public Dataset {
 public:
  ExampleBatches(std::shared_ptr<const Examples> samples, int64_t batch, uint64_t seed, bool shuffle,
                 const BatchShare& share)
      : samples_(std::move(samples)), batch_(batch), size_(samples_->size()), seed_(seed), shuffle_(shuffle) {
    check(batch > 0, Code::invalid_config, "batch size: {}; expected > 0", batch);
    check(size_ > 0, Code::internal, "batches: no samples");
    mine_ = share.rows(batch);
  }

  Batch next() override {
    std::vector<ExampleRef> rows;
    for (int64_t row = 0; row < batch_; ++row) {
      if (at_.epoch != ordered_epoch_) {
        order_ = order_of(size_, seed_, at_.epoch, shuffle_);
        ordered_epoch_ = at_.epoch;
      }
      if (rows.size() < mine_.size() && mine_[rows.size()] == row)
        rows.push_back({order_[static_cast<size_t>(at_.index)], bits_of_sample(seed_, at_.epoch, at_.index)});
      if (++at_.index == size_) at_ = {.epoch = at_.epoch + 1};
    }
    return batch_of(*samples_, rows);
  }
  Position position() const override { return at_; }
  bool seek(Position p) override {
    check_position(p);
    at_ = p.index < size_ ? p : next_epoch(p);
    return p.index <= size_;
  }
  int64_t size() const override { return size_; }

 private:
  std::shared_ptr<const Examples> samples_;
  int64_t batch_, size_;
  std::vector<int64_t> mine_;  // this process's rows of a batch
  uint64_t seed_;
  bool shuffle_;
  Position at_;
  std::vector<int64_t> order_;
  int64_t ordered_epoch_ = -1;
};

class Prefetch : public Dataset {
 public:
  Prefetch(std::unique_ptr<Dataset> source, int depth)
      : source_(std::move(source)), depth_(static_cast<size_t>(depth)) {
    check(source_ != nullptr && depth > 0, Code::internal, "prefetch: depth {} must be > 0 and a source given", depth);
    at_ = source_->position();
    size_ = source_->size();
    start();
  }
  ~Prefetch() override { stop(); }

  Batch next() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ready_.empty() || error_; });
    if (ready_.empty()) std::rethrow_exception(error_);
    Ready r = std::move(ready_.front());
    ready_.pop_front();
    at_ = r.after;
    lock.unlock();
    changed_.notify_all();
    return std::move(r.batch);
  }
  Position position() const override {
    const std::lock_guard lock(mutex_);
    return at_;
  }
  bool seek(Position p) override {
    stop();
    ready_.clear();
    error_ = nullptr;
    bool exists = false;
    try {
      exists = source_->seek(p);
      at_ = source_->position();
    } catch (...) {
      error_ = std::current_exception();  // next() must not wait: no thread is running
      throw;
    }
    start();
    return exists;
  }
  int64_t size() const override { return size_; }

 private:
  struct Ready {
    Batch batch;
    Position after;  // position of the source after this batch
  };

  void start() {
    stopping_ = false;
    thread_ = std::jthread([this] { run(); });
  }
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  void run() {
    try {
      for (;;) {
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [&] { return stopping_ || ready_.size() < depth_; });
          if (stopping_) return;
        }
        Ready r = [&] {  // without the lock, because next() may take long
          Span span("make batch");
          return Ready{source_->next(), source_->position()};
        }();
        const std::lock_guard lock(mutex_);
        ready_.push_back(std::move(r));
        changed_.notify_all();
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      changed_.notify_all();
    }
  }

  std::unique_ptr<Dataset> source_;  // used only by the thread while it runs
  const size_t depth_;
  int64_t size_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Ready> ready_;
  std::exception_ptr error_;
  Position at_;
  bool stopping_ = false;
  std::jthread thread_;
};

}  // namespace

std::unique_ptr<Dataset> prefetch(std::unique_ptr<Dataset> source, int depth) {
  check(depth >= 1, Code::invalid_config, "prefetch_depth is {}; expected 1 or more batches", depth);
  return std::make_unique<Prefetch>(std::move(source), depth);
}

std::shared_ptr<const Examples> examples_in_memory(HostArrays arrays) {
  return std::make_shared<InMemory>(std::move(arrays));
}

Batch batch_of(const Examples& samples, const std::vector<ExampleRef>& which) {
  Batch out;
  const auto n = static_cast<int64_t>(which.size());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t number = which[static_cast<size_t>(i)].index;
    const HostArrays one = samples.read(which[static_cast<size_t>(i)]);
    if (i == 0)
      for (const auto& [name, a] : one) out.emplace(name, HostArray(batched(n, a.shape())));
    check(one.size() == out.size(), Code::internal, "sample {} has {} fields, those before have {}", number, one.size(),
          out.size());
    for (const auto& [name, a] : one) {
      const auto to = out.find(name);
      check(to != out.end() && to->second.shape() == batched(n, a.shape()), Code::internal,
            "sample {}: '{}' is {}; expected the shape of the samples before", number, name, to_string(a.shape()));
      std::memcpy(to->second.mutable_data() + static_cast<size_t>(i) * a.bytes(), a.data(), a.bytes());
    }
  }
  return out;
}

std::unique_ptr<Dataset> example_batches(std::shared_ptr<const Examples> samples, int64_t batch, uint64_t seed,
                                         bool shuffle, const BatchShare& share) {
  return std::make_unique<ExampleBatches>(std::move(samples), batch, seed, shuffle, share);
}

std::unique_ptr<Dataset> in_memory(HostArrays arrays, int64_t batch, uint64_t seed, bool shuffle,
                                   const BatchShare& share) {
  return example_batches(examples_in_memory(std::move(arrays)), batch, seed, shuffle, share);
}

std::unique_ptr<Dataset> mapped(std::unique_ptr<Dataset> source, std::function<Batch(Batch)> change) {
  class Mapped final : public Dataset {
   public:
    Mapped(std::unique_ptr<Dataset> source, std::function<Batch(Batch)> change)
        : source_(std::move(source)), change_(std::move(change)) {}
    Batch next() override { return change_(source_->next()); }
    Position position() const override { return source_->position(); }
    bool seek(Position p) override { return source_->seek(p); }
    int64_t size() const override { return source_->size(); }

   private:
    std::unique_ptr<Dataset> source_;
    std::function<Batch(Batch)> change_;
  };
  return std::make_unique<Mapped>(std::move(source), std::move(change));
}

}  // namespace md
