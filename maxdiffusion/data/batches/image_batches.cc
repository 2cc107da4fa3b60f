#include "maxdiffusion/data/batches/image_batches.h"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/data/images/image_rows.h"
#include "maxdiffusion/data/records/file_hashes.h"

namespace md {
namespace {

Batch batch_of(std::vector<ImageRow>& rows, const EncodeCaptions& captions) {
  Batch out = stack_rows(rows);
  if (captions) {
    std::vector<std::string> texts;
    for (const ImageRow& r : rows) texts.push_back(r.caption);
    out.merge(captions(texts));
  }
  return out;
}

/// `bucket`: the size that the header promised, if it was read.
ImageRow image_row(const PendingRecord& read, uint64_t bits, const ImageConfig& config,
                   const ImageSize* bucket = nullptr) {
  Record r = read();
  const ImageConfig& mine = config.of_folder(r.folder);
  ImageRow row{.caption = caption_of(r, mine, bits), .name = r.name};
  try {
    PreparedImage prepared = prepare_image(r, mine, random_placement(mine, bits));
    check(!bucket || prepared.fit.size == *bucket, Code::io,
          "{}: its header gave a size for the bucket {}; it decodes to {}", r.name, bucket ? to_string(*bucket) : "",
          to_string(prepared.fit.size));
    row.arrays = std::move(prepared.arrays);
  } catch (const Error& e) {
    if (e.code() != Code::io) throw;
    row.fault = e.message();
  }
  return row;
}

/// Clips of a batch are decoded in parallel; if there are fewer clips than cores, several threads decode each.
ImageConfig on_all_cores(ImageConfig config, const BatchConfig& batches) {
  const auto rows = static_cast<int64_t>(batches.stream.share.rows(batches.batch).size());
  if (config.clip)
    config.clip->threads = std::max(1, parallel_workers(std::numeric_limits<int64_t>::max(), batches.workers) /
                                           static_cast<int>(std::clamp<int64_t>(rows, 1, 1024)));
  for (ImageConfig& folder : config.folders)
    if (folder.clip) folder.clip->threads = config.clip->threads;
  return config;
}

/// Records of shards by number.
class Placed : public RecordSource {
 public:
  using Place = std::pair<int64_t, int64_t>;  // shard, offset
  Placed(std::shared_ptr<const RecordSource> source, std::vector<Place> places)
      : RecordSource(source->name(), source->fingerprint(), source->identity()),
        source_(std::move(source)),
        places_(std::move(places)) {}
  int64_t size() const override { return static_cast<int64_t>(places_.size()); }
  Record read(int64_t index) const override { return find({index})[0](); }
  /// Reads consecutive records in one pass.
  std::vector<PendingRecord> find(const std::vector<int64_t>& numbers) const override {
    std::vector<PendingRecord> found;
    std::unique_ptr<ShardReader> reader;
    int64_t opened = -1;
    for (int64_t i : numbers) {
      const auto [shard, offset] = places_[static_cast<size_t>(i)];
      if (opened != shard || reader->offset() != offset) reader = source_->open(shard, offset);
      opened = shard;
      auto record = reader->next();
      check(record.has_value(), Code::io, "{}: record {} is missing: the file changed while it was read", name(), i);
      found.push_back(std::move(*record));
    }
    return found;
  }

 private:
  std::shared_ptr<const RecordSource> source_;
  std::vector<Place> places_;
};

class InBuckets : public Dataset {
 public:
  InBuckets(ImagesInBuckets images, const std::vector<int64_t>& counts, const ImageConfig& config,
            const BatchConfig& batches, EncodeCaptions captions)
      : images_(std::move(images)),
        config_(config),
        batches_(batches),
        captions_(std::move(captions)),
        order_(counts, batches.batch, batches.stream) {}
  Batch next() override {
    const AspectBucketOrder::Choice choice = order_.next();
    const std::vector<int64_t>& records = images_.records[choice.bucket];
    std::vector<ImageRow> rows(choice.samples.size());
    std::mutex mutex;
    parallel_for(
        static_cast<int64_t>(rows.size()),
        [&](int64_t i, int) {
          const ExampleRef& s = choice.samples[static_cast<size_t>(i)];
          ImageRow& row = rows[static_cast<size_t>(i)];
          for (size_t later = 0; later < records.size(); ++later) {
            const int64_t record = records[(static_cast<size_t>(s.index) + later) % records.size()];
            row =
                image_row([&] { return images_.source->read(record); }, s.bits, config_, &images_.sizes[choice.bucket]);
            if (row.fault.empty()) return;
            const std::lock_guard lock(mutex);
            if (named_.insert(row.fault).second) log_warning("skipped {} ({} so far)", row.fault, named_.size());
          }
          fail(Code::io, "{}: no image of bucket {} can be decoded; the last: {}", images_.source->name(),
               to_string(images_.sizes[choice.bucket]), row.fault);
        },
        batches_.workers);
    return batch_of(rows, captions_);
  }
  Position position() const override { return order_.position(); }
  bool seek(Position p) override { return order_.seek(p); }
  int64_t size() const override { return order_.size(); }

 private:
  ImagesInBuckets images_;
  ImageConfig config_;
  BatchConfig batches_;
  EncodeCaptions captions_;
  AspectBucketOrder order_;
  std::set<std::string> named_;  // skipped images that were logged
};

class SourceBatches : public Dataset {
 public:
  using MakeRow = std::function<ImageRow(const PendingRecord& read, uint64_t bits)>;
  SourceBatches(std::shared_ptr<const RecordSource> source, const BatchConfig& config, MakeRow make,
                EncodeCaptions captions)
      : stream_(std::move(source), config.stream),
        config_(config),
        make_(std::move(make)),
        captions_(std::move(captions)) {
    check(config.batch > 0, Code::invalid_config, "batch size: {}; expected > 0", config.batch);
  }
  Batch next() override {
    const BatchShare& share = stream_.share();
    const size_t mine = share.rows(config_.batch).size();
    std::vector<ImageRow> rows;
    while (rows.size() < mine) {
      const std::vector<RecordStream::Item> items =
          stream_.next(config_.batch - static_cast<int64_t>(rows.size()) * share.processes);
      std::vector<ImageRow> decoded(items.size());
      parallel_for(
          static_cast<int64_t>(items.size()),
          [&](int64_t i, int) {
            decoded[static_cast<size_t>(i)] =
                make_(items[static_cast<size_t>(i)].read, items[static_cast<size_t>(i)].bits);
          },
          config_.workers);
      for (size_t i = 0; i < decoded.size(); ++i) {
        if (share.processes > 1 && stream_.source().shards() == 0) replace_bad(decoded[i], items[i]);
        if (decoded[i].fault.empty()) {
          last_good_epoch_ = items[i].epoch;
          rows.push_back(std::move(decoded[i]));
          continue;
        }
        warn(decoded[i].fault);
        if (items[i].epoch >= last_good_epoch_ + 2) refuse(decoded[i].fault);
      }
    }
    return batch_of(rows, captions_);
  }
  Position position() const override { return stream_.position(); }
  bool seek(Position p) override {
    const bool exists = stream_.seek(p);
    last_good_epoch_ = stream_.position().epoch;
    return exists;
  }
  int64_t size() const override { return stream_.source().size(); }

 private:
  void warn(const std::string& fault) {
    if (named_.insert(fault).second) log_warning("skipped {} ({} so far)", fault, named_.size());
  }
  [[noreturn]] void refuse(const std::string& fault) const {
    fail(Code::io, "{}: no image of a whole epoch can be decoded; the last: {}", stream_.source().name(), fault);
  }
  /// Replaces a row whose record has a fault by the next record without one. The stream's position does not change.
  void replace_bad(ImageRow& row, const RecordStream::Item& record) {
    for (int64_t later = 1; !row.fault.empty(); ++later) {
      warn(row.fault);
      if (later == stream_.source().size()) refuse(row.fault);
      const RecordStream::Item other = stream_.following(record, later);
      row = make_(other.read, other.bits);
    }
  }

  RecordStream stream_;
  BatchConfig config_;
  MakeRow make_;
  EncodeCaptions captions_;
  int64_t last_good_epoch_ = 0;
  std::set<std::string> named_;  // skipped images that were logged
};

}  // namespace

std::unique_ptr<Dataset> image_batches(std::shared_ptr<const RecordSource> source, const ImageConfig& config,
                                       const BatchConfig& batches, EncodeCaptions captions) {
  check_image_config(config);
  const auto make = [images = on_all_cores(config, batches)](const PendingRecord& read, uint64_t bits) {
    return image_row(read, bits, images);
  };
  return std::make_unique<SourceBatches>(std::move(source), batches, make, std::move(captions));
}

ImagesInBuckets sort_into_aspect_buckets(std::shared_ptr<const RecordSource> source, const ImageConfig& config,
                                         bool unread, FileHashes* hashes) {
  check_image_config(config);
  constexpr size_t kTogether = 1024;
  struct Bucket {
    std::vector<int64_t> records;
    std::vector<ImagesInBuckets::Key> keys;
  };
  std::map<ImageSize, Bucket, SizeOrder> buckets;
  std::vector<Placed::Place> places;
  std::vector<PendingRecord> pending;
  int64_t number = 0;
  std::vector<std::string> skipped;
  ReadingProgress progress(source->size());
  const bool one_size =
      !config.several_sizes() || (unread && config.folders.empty() && config.buckets->sizes().size() == 1);
  const ImageSize only = !one_size        ? ImageSize()
                         : config.buckets ? config.buckets->sizes()[0]
                                          : resize_and_crop({1, 1}, config).size;
  /// Of a record by number only what `hashes` does not know is read.
  const auto key_of = [&](const RecordContent& content) {
    check(content.fault.empty(), Code::io, "{}", content.fault);
    const CaptionRules& rules = config.of_folder(content.folder).captions;
    return ImagesInBuckets::Key{content.media, content_hash(applied(rules, content.caption, 0, content.name)),
                                content.folder};
  };
  const auto sort = [&] {
    std::vector<ImageSize> sizes(pending.size(), only);
    std::vector<ImagesInBuckets::Key> keys(hashes ? pending.size() : 0);
    std::vector<std::string> reasons(pending.size());
    const auto sort_one = [&](int64_t i) {
      const auto k = static_cast<size_t>(i);
      const bool by_number = source->shards() == 0;
      const Record r = one_size && by_number ? Record() : pending[k]();
      const RecordContent content = !hashes     ? RecordContent()
                                    : by_number ? source->content(number + i, *hashes)
                                                : content_of(r);
      try {
        if (hashes) keys[k] = key_of(content);
        if (one_size) return;
        const ImageConfig& mine = config.of_folder(r.folder);
        sizes[k] = resize_and_crop_of_record(r, decode_record(r, mine, true).size, mine, {}).size;
      } catch (const Error& e) {
        if (e.code() != Code::io) throw;
        reasons[k] = e.message();
      }
    };
    if (!one_size || hashes)
      parallel_for(std::ssize(pending), [&](int64_t i, int) {
        sort_one(i);
        progress.step();
      });
    for (size_t k = 0; k < pending.size(); ++k, ++number) {
      if (reasons[k].empty()) {
        Bucket& bucket = buckets[sizes[k]];
        bucket.records.push_back(number);
        if (hashes) bucket.keys.push_back(std::move(keys[k]));
      } else {
        log_warning("skipped {}", reasons[k]);
        skipped.push_back(reasons[k]);
      }
    }
    pending.clear();
  };
  if (source->shards() == 0) {
    for (int64_t i = 0; i < source->size(); ++i) {
      pending.push_back([&source, i] { return source->read(i); });
      if (pending.size() == kTogether) sort();
    }
  } else {
    for (int64_t s = 0; s < source->shards(); ++s) {
      const auto reader = source->open(s, 0);
      for (int64_t at = reader->offset(); auto record = reader->next(); at = reader->offset()) {
        places.emplace_back(s, at);
        pending.push_back(std::move(*record));
        if (pending.size() == kTogether) sort();
      }
    }
  }
  sort();
  check(!buckets.empty(), Code::io, "{}: none of {} images fits a bucket; the first: {}", source->name(), number,
        skipped.empty() ? "there are no images" : skipped[0]);
  if (!skipped.empty()) log_warning("{}: {} of {} images were skipped", source->name(), skipped.size(), number);
  ImagesInBuckets out{.source = source, .sizes = {}, .records = {}, .skipped = std::ssize(skipped)};
  if (source->shards() > 0) out.source = std::make_shared<Placed>(source, std::move(places));
  for (auto& [size, bucket] : buckets) {
    out.sizes.push_back(size);
    out.records.push_back(std::move(bucket.records));
    if (hashes) out.keys.push_back(std::move(bucket.keys));
  }
  return out;
}

std::unique_ptr<Dataset> image_batches(ImagesInBuckets images, const ImageConfig& config, const BatchConfig& batches,
                                       EncodeCaptions captions) {
  std::vector<int64_t> counts;
  for (const auto& records : images.records) counts.push_back(static_cast<int64_t>(records.size()));
  return std::make_unique<InBuckets>(std::move(images), counts, on_all_cores(config, batches), batches,
                                     std::move(captions));
}

std::unique_ptr<Dataset> array_batches(std::shared_ptr<const RecordSource> source, const BatchConfig& config) {
  const auto make = [](const PendingRecord& read, uint64_t) {
    Record r = read();
    return ImageRow{.arrays = std::move(r.arrays), .name = std::move(r.name)};
  };
  return std::make_unique<SourceBatches>(std::move(source), config, make, nullptr);
}

}  // namespace md
