// The files of one checkpoint as memory. Files on this machine are memory-mapped. A file in a bucket gets memory of its
// size, into which only requested ranges are fetched.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/storage/storage.h"

namespace md {

/// Errors are io and name the file. Not thread safe.
class CheckpointFiles {
 public:
  /// Bytes [begin, end) of a file.
  struct Range {
    std::string name;
    uint64_t begin = 0, end = 0;
  };

  /// `folder`: on this machine, or gs:// or s3://, which is listed once.
  explicit CheckpointFiles(const std::string& folder);
  bool remote() const { return remote_; }
  /// Name of a file for messages; on this machine also its path.
  std::string path_of(const std::string& name) const;
  /// Size in bytes of a file; `name` is relative to the folder. None if the file does not exist.
  std::optional<uint64_t> size(const std::string& name) const;
  /// Relative paths of the files directly in a folder of the checkpoint, sorted.
  std::vector<std::string> in(const std::string& folder) const;
  /// A whole small file.
  const std::string& text(const std::string& name);
  /// The file's memory. Bytes of a file in a bucket are zero until they are fetched.
  const MappedFile& map(const std::string& name);
  /// Releases the resident pages of memory-mapped files; a later read loads them again.
  void let_go() const;
  /// Fetches missing ranges in whole chunks of `chunk_bytes`, with many requests at a time. Files on this machine
  /// need no fetch.
  void fetch(const std::vector<Range>& ranges, uint64_t chunk_bytes);
  /// Bytes fetched from a bucket, without those of text().
  uint64_t bytes_fetched() const { return bytes_fetched_; }

 private:
  struct Memory {
    MappedFile map;
    std::byte* data = nullptr;  // of a file in a bucket
    std::shared_ptr<const InputFile> input;
    std::vector<bool> fetched;  // chunks
  };
  Memory& memory(const std::string& name);

  std::string folder_;
  bool remote_;
  std::map<std::string, FoundFile> found_;  // in a bucket
  std::map<std::string, std::string> texts_;
  std::map<std::string, Memory> memory_;
  uint64_t bytes_fetched_ = 0;
};

}  // namespace md
