#include "maxdiffusion/data/records/records.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {
namespace {

class FirstByNumber : public RecordSource {
 public:
  FirstByNumber(std::shared_ptr<const RecordSource> source, int64_t n)
      : RecordSource(source->name(), fmt::format("{} first {}", source->fingerprint(), n), source->identity()),
        source_(std::move(source)),
        n_(n) {}
  int64_t size() const override { return n_; }
  RecordContent content(int64_t index, FileHashes& hashes) const override { return source_->content(index, hashes); }
  Record read(int64_t index) const override { return source_->read(index); }

 private:
  std::shared_ptr<const RecordSource> source_;
  int64_t n_;
};

// Truncates shards after the first records; reads them once to find where.
class FirstOfShards : public RecordSource {
 public:
  FirstOfShards(std::shared_ptr<const RecordSource> source, int64_t n)
      : RecordSource(source->name(), fmt::format("{} first {}", source->fingerprint(), n), source->identity()),
        source_(std::move(source)) {
    for (int64_t s = 0; s < source_->shards() && size_ < n; ++s) {
      const auto reader = source_->open(s, 0);
      while (size_ < n && reader->next()) ++size_;
      ends_.push_back(size_ < n ? -1 : reader->offset());
    }
  }
  int64_t size() const override { return size_; }
  int64_t shards() const override { return static_cast<int64_t>(ends_.size()); }
  std::unique_ptr<ShardReader> open(int64_t shard, int64_t offset) const override {
    struct Cut : ShardReader {
      std::unique_ptr<ShardReader> reader;
      int64_t end;
      std::optional<PendingRecord> next() override { return reader->offset() == end ? std::nullopt : reader->next(); }
      int64_t offset() const override { return reader->offset(); }
    };
    auto cut = std::make_unique<Cut>();
    cut->reader = source_->open(shard, offset);
    cut->end = ends_[static_cast<size_t>(shard)];
    return cut;
  }

 private:
  std::shared_ptr<const RecordSource> source_;
  std::vector<int64_t> ends_;  // −1: at the end of the shard
  int64_t size_ = 0;
};

}  // namespace

Record RecordSource::read(int64_t) const { fail(Code::internal, "{}: records cannot be read by number", name()); }
std::vector<PendingRecord> RecordSource::find(const std::vector<int64_t>& numbers) const {
  std::vector<PendingRecord> found;
  found.reserve(numbers.size());
  for (int64_t i : numbers) found.push_back([this, i] { return read(i); });
  return found;
}
std::unique_ptr<ShardReader> RecordSource::open(int64_t, int64_t) const {
  fail(Code::internal, "{}: no shards", name());
}

RecordStream::RecordStream(std::shared_ptr<const RecordSource> source, const StreamConfig& config)
    : source_(std::move(source)), config_(config) {
  check(config.window > 0, Code::invalid_config, "shuffle window: {}; expected > 0", config.window);
  check(source_->size() != 0, Code::io, "{}: no records", source_->name());
  if (source_->shards() > 0) config_.share.parts.clear();  // only for records by number
  split_records_ = source_->shards() > 0 && source_->shards() < config.share.processes;
  if (split_records_) {
    log_warning("{}: {} shards for {} processes: each process reads all and keeps its part", source_->name(),
                source_->shards(), config.share.processes);
  }
}

std::vector<RecordStream::Item> RecordStream::next(int64_t batch) {
  std::vector<Item> out;
  if (source_->shards() > 0) {
    for (size_t n = config_.share.rows(batch).size(); n > 0; --n) out.push_back(next_in_shards());
    return out;
  }
  for (int64_t row : config_.share.rows(batch)) out.push_back(item_at(at_.epoch, at_.index + row));
  const int64_t size = source_->size();
  at_ = {.epoch = at_.epoch + (at_.index + batch) / size, .index = (at_.index + batch) % size};
  return out;
}

// The common order continues across epochs; `index` may exceed the size of its epoch.
RecordStream::Item RecordStream::item_at(int64_t epoch, int64_t index) {
  const int64_t size = source_->size();
  epoch += index / size, index %= size;
  if (epoch != ordered_epoch_) {
    order_ = order_of(size, config_.seed, epoch, config_.shuffle);
    ordered_epoch_ = epoch;
  }
  return {epoch, bits_of_sample(config_.seed, epoch, index),
          [source = source_, i = order_[static_cast<size_t>(index)]] { return source->read(i); }, index};
}

RecordStream::Item RecordStream::following(const Item& record, int64_t later) {
  return item_at(record.epoch, record.index + later);
}

RecordStream::Item RecordStream::next_in_shards() {
  for (int empty = 0; window_.empty() || at_.consumed == static_cast<int64_t>(window_.size());) {
    if (fill_window()) break;
    check(++empty<2, Code::io, "{}: no records{}", source_->name(), config_.share.processes> 1
              ? fmt::format(" for process {} of {}", config_.share.process, config_.share.processes)
              : "");
    at_ = {.epoch = at_.epoch + 1};
    reader_.reset();
    window_.clear();
  }
  Item n{at_.epoch,
         bits_of_sample(config_.seed, at_.epoch, at_.index * config_.share.processes + config_.share.process),
         std::move(window_[static_cast<size_t>(at_.consumed)]), 0};
  ++at_.index, ++at_.consumed;
  return n;
}

std::vector<int64_t> RecordStream::shard_order() const {
  std::vector<int64_t> all = order_of(source_->shards(), config_.seed, at_.epoch, config_.shuffle);
  if (split_records_) return all;
  std::vector<int64_t> mine;
  for (int64_t s : all) {
    if (s % config_.share.processes == config_.share.process) mine.push_back(s);
  }
  return mine;
}

void RecordStream::open_next_shard(int64_t offset) {
  const auto s = static_cast<size_t>(shard_);
  reader_ = s < shards_.size() ? source_->open(shards_[s], offset) : nullptr;
}

// Reads the next window, from the end of the last one or, after seek(), from the position. Returns false at the end of
// the epoch.
bool RecordStream::fill_window() {
  if (!reader_) {
    shards_ = shard_order();
    shard_ = at_.shard;
    open_next_shard(at_.offset);
    // The last record that this process kept before the position determines the ordinal.
    const int64_t read = at_.index - at_.consumed;
    ordinal_ = !split_records_ || read == 0 ? 0 : (read - 1) * config_.share.processes + config_.share.process + 1;
  } else {
    at_.shard = shard_, at_.offset = reader_->offset();
    at_.consumed = 0;
  }
  const int64_t number = at_.index - at_.consumed;
  window_.clear();
  while (reader_ && static_cast<int64_t>(window_.size()) < config_.window) {
    auto record = reader_->next();
    if (!record) {
      // Keeps the last reader: a position at the end of the epoch is in its shard.
      if (shard_ + 1 >= static_cast<int64_t>(shards_.size())) break;
      ++shard_;
      open_next_shard(0);
    } else if (!split_records_ || ordinal_++ % config_.share.processes == config_.share.process) {
      window_.push_back(std::move(*record));
    }
  }
  if (window_.empty()) return false;
  const auto order = order_of(static_cast<int64_t>(window_.size()), mix(config_.seed) ^ static_cast<uint64_t>(number),
                              at_.epoch, config_.shuffle);
  std::vector<PendingRecord> shuffled;
  for (int64_t i : order) shuffled.push_back(std::move(window_[static_cast<size_t>(i)]));
  window_ = std::move(shuffled);
  return true;
}

bool RecordStream::seek(Position p) {
  check_position(p);
  reader_.reset();
  window_.clear();
  if (source_->shards() == 0) {
    const bool exists = p.index <= source_->size() && p == Position{.epoch = p.epoch, .index = p.index};
    at_ = exists && p.index < source_->size() ? p : next_epoch(p);
    return exists;
  }
  bool exists = p.consumed <= p.index && (p.shard < source_->shards() || p == Position{.epoch = p.epoch});
  at_ = p;
  if (exists && p.consumed > 0) {
    fill_window();
    exists = p.consumed <= static_cast<int64_t>(window_.size());
  }
  if (exists) return true;
  at_ = next_epoch(p);
  reader_.reset();
  window_.clear();
  return false;
}

void each_record(const RecordSource& source, const std::function<void(const Record&)>& take) {
  for (int64_t i = 0; source.shards() == 0 && i < source.size(); ++i) take(source.read(i));
  for (int64_t shard = 0; shard < source.shards(); ++shard) {
    const auto reader = source.open(shard, 0);
    while (const std::optional<PendingRecord> next = reader->next()) take((*next)());
  }
}

std::shared_ptr<const RecordSource> first_records(std::shared_ptr<const RecordSource> source, int64_t records) {
  if (records < 0 || (source->size() >= 0 && source->size() <= records)) return source;
  check(records > 0, Code::invalid_config,
        "max_train_samples is 0; expected -1 or more than 0: no record of {} would be left", source->name());
  if (source->shards() == 0) return std::make_shared<FirstByNumber>(source, records);
  return std::make_shared<FirstOfShards>(source, records);
}

}  // namespace md
