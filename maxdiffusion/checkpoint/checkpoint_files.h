// The files of one checkpoint as memory. On this machine they are mapped. Of one in a bucket there is memory of each
// file's size, into which only requested ranges are fetched.
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

  /// `folder`: a folder of this machine, or gs:// or s3://, which is listed once.
  explicit CheckpointFiles(const std::string& folder);
  bool remote() const { return remote_; }
  /// The file for messages and, on this machine, its path.
  std::string path_of(const std::string& name) const;
  /// Bytes of a file by its path relative to the folder; nothing where there is none.
  std::optional<uint64_t> size(const std::string& name) const;
  /// Relative paths of the files directly in a folder of the checkpoint, sorted.
  std::vector<std::string> in(const std::string& folder) const;
  /// A whole small file.
  const std::string& text(const std::string& name);
  /// The file's memory. In a bucket, what was not fetched is zero.
  const MappedFile& map(const std::string& name);
  /// Pages of files of this machine leave this process's memory; they come again when they are touched.
  void let_go() const;
  /// Fetches what is not there yet, in whole chunks of `chunk_bytes`, with many requests at a time. Of files on this
  /// machine there is nothing to fetch.
  void fetch(const std::vector<Range>& ranges, uint64_t chunk_bytes);
  /// From a bucket, texts aside.
  uint64_t bytes_fetched() const { return bytes_fetched_; }

 private:
  struct Memory {
    MappedFile map;
    std::byte* data = nullptr;  // of a file in a bucket
    std::shared_ptr<const InputFile> input;
    std::vector<bool> here;  // chunks
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
