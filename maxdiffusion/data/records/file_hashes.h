// What records hold, as hashes: a record that is found again, in whatever file, need not be encoded again. Hashes of
// files are kept, so that a file is read once as long as its size and times stay the same.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>

#include "maxdiffusion/data/records/records.h"

namespace md {

/// Hashes of files, kept in a file between runs. Thread safe.
class FileHashes {
 public:
  /// `place`: where they are kept, a file that may be in a bucket; "": nowhere. A file that is missing or damaged holds
  /// none.
  explicit FileHashes(std::string place);
  /// The hash of a file's bytes. Reads the file, unless it was read before with the same size and times. Throws io.
  std::string of(const FoundFile& file);
  /// The text that `compute` returns, or returned for the same key before.
  std::string of(const std::string& key, const std::function<std::string()>& compute);
  /// How often something was computed, or a file read.
  int64_t computed() const { return computed_; }
  /// Saves what was requested, if it is not what was saved before.
  void save() const;

 private:
  std::string place_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::string> known_, requested_;  // known_: of the file that was read
  std::atomic<int64_t> computed_ = 0;
};

/// What a record that was read holds.
RecordContent content_of(const Record& record);
/// What a record of stored files holds: hashes of its image or frames, of its reference images, and of its mask ("":
/// none).
std::string media_hash(const std::vector<std::string>& images, const std::vector<std::string>& references,
                       const std::string& mask, const std::optional<CropBox>& box);

}  // namespace md
