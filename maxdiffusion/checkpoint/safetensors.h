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
  /// `path`: a .safetensors file, a .safetensors.index.json, a GGUF file (recognized by its first bytes; gguf.h), or a
  /// folder. In a folder it finds the usual names of diffusers or transformers; if there is only one variant
  /// ("model.fp16.safetensors"), that, with a log line; or a GGUF file if it has no other weights. Throws io naming
  /// file, tensor and offset if the header is truncated, has overlapping tensors or does not fit the file. For a
  /// pickled file the error says how to convert it.
  static SafetensorsReader open(const std::string& path);
  /// Reads a file in memory, whose header must be present. `name` is for messages.
  static SafetensorsReader of(const std::string& name, const MappedFile& file);
  const HostArrays& tensors() const& { return tensors_; }
  /// By value, so that a loop over open(…).tensors() keeps the tensors alive.
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

/// The file or index in `folder` with the weights of a variant, such as "fp16"; empty if there is none.
std::string file_of_variant(const std::string& folder, const std::string& variant);
/// Whether a weights file's name has a variant.
bool has_variant(const std::string& file);

/// An array that is computed when it is written, and then released.
struct ArrayToWrite {
  Shape shape;
  std::function<HostArray()> make;
};
using ArraysToWrite = std::map<std::string, ArrayToWrite>;
ArraysToWrite to_write(const HostArrays& arrays);

/// Writes one file under a temporary name, fsyncs and renames it. Throws io (disk full: an existing file is unchanged).
/// transformers requires the default metadata to load a file.
void write_safetensors(const std::string& path, const ArraysToWrite& tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
inline void write_safetensors(const std::string& path, const HostArrays& tensors,
                              const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
  write_safetensors(path, to_write(tensors), metadata);
}
inline constexpr int64_t kMaxShardBytes = 10'000'000'000;
/// Writes `stem.safetensors`, or shards `stem-00001-of-0000N.safetensors` with `stem.safetensors.index.json` if the
/// arrays exceed `max_shard_bytes`; a tensor is never split. Finally removes files of an earlier write of this stem
/// that the new one does not use. Returns the name of the file that holds each array.
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
/// The text of the index of shards: the shard of each tensor. `bytes`: total size of all tensors.
std::string shard_index(const std::map<std::string, std::string>& shard_of, int64_t bytes);

}  // namespace md
