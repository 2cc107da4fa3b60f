// safetensors files: 8-byte header length, JSON header, raw little-endian arrays. One file, or shards with an index.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array.h"

namespace md {

/// Named arrays of one file or of an indexed set of shards. Arrays borrow the memory map, so reading costs nothing
/// until the bytes are touched. Everything in the header is checked against the file's size before use.
class SafetensorsReader {
 public:
  /// `path`: a .safetensors file, a .safetensors.index.json, or a folder holding one of diffusers' or transformers'
  /// usual names; where it holds only one variant ("model.fp16.safetensors"), that, with a line in the log. Throws io
  /// naming file, tensor and offset for truncated, overlapping or lying headers, and saying how to convert a pickled
  /// file.
  static SafetensorsReader open(const std::string& path);
  /// Of a file in memory, whose header is there: `name` is for messages.
  static SafetensorsReader of(const std::string& name, const MappedFile& file);
  const HostArrays& tensors() const& { return tensors_; }
  /// By value, so that a loop over open(…).tensors() holds what it walks.
  HostArrays tensors() && { return std::move(tensors_); }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// The file a tensor came from.
  const std::string& file_of(const std::string& tensor) const;
  /// Where in that file its bytes begin.
  uint64_t offset_of(const std::string& tensor) const;

 private:
  struct OneFile;
  static OneFile read_one(const std::string& file, const MappedFile& m);
  HostArrays tensors_;
  std::map<std::string, std::string> metadata_, files_;
  std::map<std::string, uint64_t> offsets_;
};

/// The file or index of a folder that holds its weights in a variant, such as "fp16"; empty: there is none.
std::string file_of_variant(const std::string& folder, const std::string& variant);
/// Whether a weights file's name says a variant.
bool has_variant(const std::string& file);

/// An array that is made when it is written, and let go of then.
struct ArrayToWrite {
  Shape shape;
  std::function<HostArray()> make;
};
using ArraysToWrite = std::map<std::string, ArrayToWrite>;
ArraysToWrite to_write(const HostArrays& arrays);

/// Writes one file, to a temporary name, fsynced, renamed. Throws io (disk full: what was there stays). The default
/// metadata is what transformers requires to load a file.
void write_safetensors(const std::string& path, const ArraysToWrite& tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
inline void write_safetensors(const std::string& path, const HostArrays& tensors,
                              const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
  write_safetensors(path, to_write(tensors), metadata);
}
inline constexpr int64_t kMaxShardBytes = 10'000'000'000;
/// Writes `stem.safetensors`, or shards `stem-00001-of-0000N.safetensors` with `stem.safetensors.index.json` when the
/// arrays exceed `max_shard_bytes`; a tensor is never split. Files of an earlier write of this stem that the new one
/// does not name are removed last. Returns the name of the file that holds each array.
std::map<std::string, std::string> write_sharded_safetensors(const std::string& folder, const std::string& stem,
                                                             const ArraysToWrite& tensors,
                                                             int64_t max_shard_bytes = kMaxShardBytes);
inline std::map<std::string, std::string> write_sharded_safetensors(const std::string& folder, const std::string& stem,
                                                                    const HostArrays& tensors,
                                                                    int64_t max_shard_bytes = kMaxShardBytes) {
  return write_sharded_safetensors(folder, stem, to_write(tensors), max_shard_bytes);
}
/// "stem.safetensors", or the name of the shard `i` (from 0) of several.
std::string shard_name(const std::string& stem, size_t i, size_t shards);
/// The text of the index of shards: by tensor, its shard. `bytes`: of all tensors.
std::string shard_index(const std::map<std::string, std::string>& shard_of, int64_t bytes);

}  // namespace md
