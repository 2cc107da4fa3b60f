#include "maxdiffusion/data/records/missing_captions.h"

#include <mutex>
#include <unordered_set>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {
namespace {

/// Counts records, each once. Thread safe.
class Counter {
 public:
  explicit Counter(std::string where) : where_(std::move(where)) {}
  ~Counter() {
    if (missing_ > 0 && !all_said_) say();
  }
  Counter(const Counter&) = delete;
  /// A record that was read, at a place of its own. `size`: of the source; −1: not known.
  void add(uint64_t place, const Record& record, int64_t size) {
    // Places take 40 MB at most; the count says of how many records it is.
    constexpr size_t kMost = 1 << 20;
    const std::lock_guard lock(mutex_);
    if (read_.size() >= kMost) return;
    if (!read_.insert(place).second) {  // the second time through the data
      if (missing_ > 0 && !all_said_) say();
      return;
    }
    all_said_ = false;
    if (trimmed(record.caption).empty() && missing_++ == 0)
      log_warning("{}: no caption; it trains with an empty one, as others that have none, which are counted",
                  record.name);
    if (std::ssize(read_) == size && missing_ > 0) say();
  }

 private:
  void say() {
    warn_of_missing({.where = where_, .things = "records", .missing = missing_, .all = std::ssize(read_)});
    all_said_ = true;
  }
  const std::string where_;
  std::mutex mutex_;
  std::unordered_set<uint64_t> read_;
  int64_t missing_ = 0;
  bool all_said_ = false;
};

class Counted : public RecordSource {
 public:
  explicit Counted(std::shared_ptr<const RecordSource> source)
      : RecordSource(source->name(), source->fingerprint(), source->identity()),
        source_(std::move(source)),
        counter_(std::make_shared<Counter>(source_->name())) {}
  int64_t size() const override { return source_->size(); }
  int64_t shards() const override { return source_->shards(); }
  bool masks() const override { return source_->masks(); }
  Record read(int64_t index) const override {
    Record r = source_->read(index);
    counter_->add(static_cast<uint64_t>(index), r, size());
    return r;
  }
  RecordContent content(int64_t index, FileHashes& hashes) const override {
    RecordContent content = source_->content(index, hashes);
    counter_->add(static_cast<uint64_t>(index), {.name = content.name, .caption = content.caption}, size());
    return content;
  }
  std::unique_ptr<ShardReader> open(int64_t shard, int64_t offset) const override {
    struct Reader : ShardReader {
      std::unique_ptr<ShardReader> reader;
      std::shared_ptr<Counter> counter;
      int64_t shard = 0, size = -1;
      std::optional<PendingRecord> next() override {
        const auto place = mix(static_cast<uint64_t>(shard)) ^ static_cast<uint64_t>(reader->offset());
        std::optional<PendingRecord> record = reader->next();
        if (!record) return record;
        return [read = std::move(*record), counter = counter, place, size = size] {
          Record r = read();
          counter->add(place, r, size);
          return r;
        };
      }
      int64_t offset() const override { return reader->offset(); }
    };
    auto reader = std::make_unique<Reader>();
    reader->reader = source_->open(shard, offset);
    reader->counter = counter_;
    reader->shard = shard, reader->size = size();
    return reader;
  }

 private:
  std::shared_ptr<const RecordSource> source_;
  std::shared_ptr<Counter> counter_;  // of pending records, too
};

}  // namespace

void warn_of_missing(const MissingCaptions& m) {
  if (m.missing == 0) return;
  log_line_once(
      LogLevel::warning,
      fmt::format("{}: {} of {} {} {} no caption{}: {} with {}{}", m.where, m.missing, m.all, m.things,
                  m.missing == 1 ? "has" : "have", m.expected.empty() ? "" : " (" + m.expected + ")",
                  m.missing == 1 ? "it trains" : "they train", m.instead, m.hint.empty() ? "" : "; try: " + m.hint));
}

std::shared_ptr<const RecordSource> with_counted_captions(std::shared_ptr<const RecordSource> source) {
  return std::make_shared<Counted>(std::move(source));
}

}  // namespace md
