// Training data: sources of records, and streams that read records from them in a seeded order whose position can be
// saved and restored.
//
//   auto source = open_source({.dataset_type = "hf", .hf_train_files = "data/*.parquet"});   // open_source.h
//   RecordStream stream(source, {.seed = 0});
//   Record r = stream.next().read();
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/data/records/data_identity.h"
#include "maxdiffusion/data/records/position.h"
#include "maxdiffusion/mesh/batch_share.h"
#include "maxdiffusion/storage/storage.h"

namespace md {

/// In pixels of the upright image.
struct CropBox {
  int64_t left = 0, top = 0, width = 0, height = 0;
};

struct Record {
  std::string name;              // "file row 12", for messages
  Blob image;                    // as stored: PNG, JPEG or WebP, or a video; or
  HostArray pixels;              // u8 [H, W, 3]; or
  std::vector<Blob> frames;      // images of a clip
  Blob mask;                     // an image as stored, whose red channel holds the weights of pixels; empty: none
  std::vector<Blob> references;  // reference images as stored, those of cond_image_column in order
  std::optional<CropBox> box;    // the part of the image to use; none: all of it
  std::string fault;             // why there is no image, although the record should have one
  std::string caption;
  int64_t folder = -1;  // number in a data set of several folders (folders/data_folders.h)
  HostArrays arrays;    // precomputed arrays, instead of an image
};

/// What a record holds, without its bytes.
struct RecordContent {
  std::string name;     // Record::name
  std::string media;    // hash of its image or clip, its mask, its reference images and its box
  std::string caption;  // Record::caption
  int64_t folder = -1;  // Record::folder
  std::string fault;    // why it cannot be read
};
class FileHashes;

/// A record found but not yet read or parsed: called once, on any thread. Throws io.
using PendingRecord = std::function<Record()>;

/// Reads one shard in order. One thread at a time.
class ShardReader {
 public:
  virtual ~ShardReader() = default;
  /// The next record; none at the end of the shard. Throws io.
  virtual std::optional<PendingRecord> next() = 0;
  /// Offset of the next record; open() with this offset continues there.
  virtual int64_t offset() const = 0;
};

/// Records either by number, or in shards that are read in order. Thread safe.
class RecordSource {
 public:
  RecordSource(std::string name, std::string fingerprint, DataIdentity identity = {})
      : name_(std::move(name)), fingerprint_(std::move(fingerprint)), identity_(std::move(identity)) {}
  virtual ~RecordSource() = default;
  /// Kind and place, for messages.
  const std::string& name() const { return name_; }
  /// Changes if the source files (names, sizes and times) or the requested columns change.
  const std::string& fingerprint() const { return fingerprint_; }
  DataIdentity identity() const {
    DataIdentity all = identity_;
    all.samples = size();
    return all;
  }
  /// Number of records; −1: unknown until all are read.
  virtual int64_t size() const = 0;
  /// Number of shards; 0: read() returns any record.
  virtual int64_t shards() const { return 0; }
  /// Whether records have masks.
  virtual bool masks() const { return false; }
  /// Whether records without a caption were counted when the source was opened, or none can lack one.
  virtual bool captions_are_counted() const { return false; }
  virtual Record read(int64_t index) const;
  /// What a record holds. Of records that are files, only files that `hashes` does not know are read; of others the
  /// record is.
  virtual RecordContent content(int64_t index, FileHashes& hashes) const;
  /// Locates records by number. They must be read before the source is destroyed.
  virtual std::vector<PendingRecord> find(const std::vector<int64_t>& numbers) const;
  virtual std::unique_ptr<ShardReader> open(int64_t shard, int64_t offset) const;

 protected:
  void set_identity(DataIdentity identity) { identity_ = std::move(identity); }

 private:
  std::string name_, fingerprint_;
  DataIdentity identity_;
};

/// Reads every record once, in the order in which they are stored. Throws io at the first that cannot be read.
void each_record(const RecordSource& source, const std::function<void(const Record&)>& take);

struct StreamConfig {
  uint64_t seed = 0;
  bool shuffle = true;
  /// Records that are read in order are shuffled in windows of this size, held in memory as stored.
  int64_t window = 1024;
  /// This process's share. By number: its rows of each batch of the common order. In shards: every `processes`-th shard
  /// or, if there are fewer shards, every `processes`-th record, with a warning.
  BatchShare share;
};

/// An endless stream. Each epoch has every record once. By number: shuffled by (seed, epoch). In shards: shards are
/// shuffled by (seed, epoch) and each is read from start to end; then windows of records are shuffled by (seed, epoch,
/// window). Without shuffling: as stored.
class RecordStream {
 public:
  RecordStream(std::shared_ptr<const RecordSource> source, const StreamConfig& config);

  struct Item {
    int64_t epoch;
    uint64_t bits;  // random bits of this record in this epoch
    PendingRecord read;
    int64_t index;  // by number: its position in the common order of the epoch
  };
  /// This process's part of the next `batch` records of all processes. Throws io, also if the source has no records for
  /// this process.
  std::vector<Item> next(int64_t batch);
  /// One record for each process.
  Item next() { return std::move(next(config_.share.processes).front()); }
  /// By number: the record `later` positions after another in the common order. The stream's position does not change.
  Item following(const Item& record, int64_t later);
  /// For records read by number, the position counts the records of all processes: it is the same in every process, and
  /// stays valid for another number of processes. Otherwise it is specific to this process.
  Position position() const { return at_; }
  /// As Dataset::seek.
  bool seek(Position p);
  const RecordSource& source() const { return *source_; }
  const BatchShare& share() const { return config_.share; }

 private:
  Item next_in_shards();
  Item item_at(int64_t epoch, int64_t index);
  bool fill_window();
  void open_next_shard(int64_t offset);
  std::vector<int64_t> shard_order() const;

  std::shared_ptr<const RecordSource> source_;
  StreamConfig config_;
  Position at_;
  // State for records by number.
  std::vector<int64_t> order_;
  int64_t ordered_epoch_ = -1;
  // State for shards: the current window and the remaining shards.
  bool split_records_ = false;  // whether processes split records, not shards
  std::vector<int64_t> shards_;
  std::unique_ptr<ShardReader> reader_;
  int64_t shard_ = 0, ordinal_ = 0;
  std::vector<PendingRecord> window_;
};

/// The first `records` of a source, in stored order.
std::shared_ptr<const RecordSource> first_records(std::shared_ptr<const RecordSource> source, int64_t records);

}  // namespace md
