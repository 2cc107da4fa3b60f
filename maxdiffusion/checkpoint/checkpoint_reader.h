// One checkpoint, opened for reading parts of it: what arrays there are is known, and of their bytes those are read
// that are requested, from whatever files and shards they lie in.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/shard_files.h"

namespace md {

/// How a checkpoint in a bucket is read: files are copied to this machine first, and are found here the next time; or
/// the requested bytes are fetched into memory.
enum class FromBucket { copies, ranges };

/// Every byte is compared with the checkpoint's checksums before it is used. Errors are io and name the
/// file that is missing, damaged or not what the index says. Not thread safe.
class CheckpointReader {
 public:
  /// Opens the training state in the folder of a checkpoint, which may be in a bucket.
  explicit CheckpointReader(const std::string& folder, FromBucket how = FromBucket::copies);

  /// On this machine; of ranges, in the bucket.
  const std::string& folder() const { return folder_; }
  const std::string& state_json() const { return state_json_; }
  const ShardIndex& arrays() const { return arrays_; }
  bool contains(const std::string& array) const { return arrays_.contains(array); }
  const Shape& shape(const std::string& array) const { return find(array).shape; }

  /// For a run that resumes, which does not read them: warns of configs that were changed by hand.
  void warn_of_configs();
  /// Makes the weights of a component known as arrays "weights/<component>/<name>": those of the folder in diffusers'
  /// layout, where the training state does not have them in shards already. Returns whether there are any.
  bool add_component(const std::string& component);
  /// Makes the layers of `array`, in whose name one '*' is their number, known as one array with an axis for
  /// them.
  void add_stack(const std::string& array, int64_t layers);

  /// Parts of arrays that read() will return. Of ranges in a bucket they are fetched now, with many requests at a time.
  using Parts = std::vector<std::pair<std::string, std::vector<Slice>>>;
  void fetch(const Parts& parts);
  /// These parts of an array, borrowed from the file where that is possible.
  ShardedArray read(const std::string& array, const std::vector<Slice>& slices);
  ShardedArray read(const std::string& array) { return read(array, {Slice::all(shape(array).dims)}); }
  /// Pages of files that are mapped leave this process's memory; they come again when they are touched.
  void let_go_of_files() { checksums_.files().let_go(); }
  /// Of the files so far; each chunk that checksums are of counts whole, and once.
  uint64_t bytes_read() const { return checksums_.bytes_read(); }
  /// All shards of an array, mapped and compared with nothing.
  ShardedArray mapped(const std::string& array);

 private:
  struct Tensor {
    HostArray values;
    uint64_t offset;  // of its first byte in the file
  };
  const IndexedArray& find(const std::string& array) const;
  const SafetensorsReader& file(const std::string& name);
  Tensor tensor(const std::string& array, const Shape& shape, const FileShard& shard);
  /// Calls take(shard, its tensor, begin, end) for each stretch of bytes of the shard's file that hold a part.
  template <class F>
  void each_stretch(const std::string& array, const Slice& part, F&& take);

  std::string origin_, folder_;
  Checksums checksums_;
  std::string state_json_, index_;
  ShardIndex arrays_;
  std::map<std::string, SafetensorsReader> files_;
};

}  // namespace md
