// Reads parts of one checkpoint. Opening it lists its arrays; only the requested bytes are read, from whichever files
// and shards hold them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/shard_files.h"

namespace md {

/// How a checkpoint in a bucket is read. `copies`: copies files to this machine first, where the next reader finds
/// them. `ranges`: fetches the requested bytes into memory.
enum class FromBucket { copies, ranges };

/// Compares every byte with the checkpoint's checksums before use. Errors are io and name the file that is missing,
/// damaged or inconsistent with the index. Not thread safe.
class CheckpointReader {
 public:
  /// Opens the training state in the folder of a checkpoint, which may be in a bucket.
  explicit CheckpointReader(const std::string& folder, FromBucket mode = FromBucket::copies);

  /// The folder on this machine; with FromBucket::ranges, the one in the bucket.
  const std::string& folder() const { return folder_; }
  const std::string& state_json() const { return state_json_; }
  const ShardIndex& arrays() const { return arrays_; }
  bool contains(const std::string& array) const { return arrays_.contains(array); }
  const Shape& shape(const std::string& array) const { return find(array).shape; }

  /// Warns of configs that were edited. A run that resumes calls it, as it does not read them.
  void warn_of_configs();
  /// Adds the weights of a component as arrays "weights/<component>/<name>": those of its folder in diffusers' layout,
  /// unless the training state already has them in shards. Returns whether the component has any weights.
  bool add_component(const std::string& component);
  /// Adds an array that stacks the layers of `array` along a new axis. One '*' in the name is the layer's number.
  void add_stack(const std::string& array, int64_t layers);

  /// The name of the array with these layers, where the checkpoint may have stacked them otherwise: the array itself if
  /// it has these dims, or one that this function adds, built from rows of other stacks and of single layers. None if a
  /// layer is missing. Layers of some state arrays have a first axis of size 1, which stacks have not.
  std::optional<std::string> with_layers(const std::string& array, const Dims& dims);

  /// Parts of arrays that read() will return. With FromBucket::ranges, fetch() downloads them, with many requests at a
  /// time.
  using Parts = std::vector<std::pair<std::string, std::vector<Slice>>>;
  void fetch(const Parts& parts);
  /// Returns these parts of an array, borrowed from the file if possible.
  ShardedArray read(const std::string& array, const std::vector<Slice>& slices);
  ShardedArray read(const std::string& array) { return read(array, {Slice::all(shape(array).dims)}); }
  /// Releases the resident pages of memory-mapped files; a later read loads them again.
  void let_go_of_files() { checksums_.files().let_go(); }
  /// Bytes of files read so far. A chunk of the checksums counts as a whole, and once.
  uint64_t bytes_read() const { return checksums_.bytes_read(); }
  /// All shards of an array, memory-mapped and not verified.
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
  /// By layer: its stack and row. Made when first used.
  std::optional<std::map<std::string, std::pair<std::string, int64_t>>> rows_;
};

}  // namespace md
