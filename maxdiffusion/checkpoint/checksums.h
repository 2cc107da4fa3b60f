// Checksums of a checkpoint's files, computed when it was written: training_state/checksums.json,
//
//   {"algorithm": "XXH3-128", "chunk_bytes": 1048576, "files": {"unet/diffusion_pytorch_model.safetensors":
//     {"bytes": 10270077736, "hash": "…", "chunks": ["…", "…", …]}}}
//
// Hashes are as `xxhsum -H2` prints them. Files of arrays also have one hash for each chunk, so that a reader of a part
// of a file verifies that part only. The list has every file of the checkpoint except itself.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "maxdiffusion/checkpoint/checkpoint_files.h"

namespace md {

inline constexpr const char* kChecksums = "training_state/checksums.json";
inline constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

struct FileChecksum {
  uint64_t bytes = 0;
  std::string hash;
  std::vector<std::string> chunks;  // hash of each chunk; only of files of arrays
};
/// By path relative to the checkpoint's folder.
using FileChecksums = std::map<std::string, FileChecksum>;

/// Relative paths of all files below `folder`.
std::set<std::string> files_under(const std::string& folder);
/// Checksums of these files of a folder. A file that this process has hashed before (a hard link to an earlier
/// checkpoint) is not read again.
FileChecksums checksums_of(const std::string& folder, const std::set<std::string>& names,
                           uint64_t chunk_bytes = kChunkBytes);
FileChecksum checksum_of_text(const std::string& text);
/// The text of checksums.json.
std::string to_json(const FileChecksums& files, uint64_t chunk_bytes = kChunkBytes);
/// Throws io naming `file`, the source of the text, and the damaged entry.
FileChecksums parse_checksums(const std::string& text, const std::string& file, uint64_t* chunk_bytes = nullptr);

enum class ChecksumsOf { all, all_but_weights };

/// Compares the files of one checkpoint with its checksums. Older checkpoints, and other folders, have none: nothing is
/// compared then. Errors are io and name the file. Users may edit configs (model_index.json, config.json,
/// scheduler_config.json, …): a changed config is a warning. Not thread safe.
class Checksums {
 public:
  /// `folder`: on this machine or in a bucket; of files in a bucket only the compared bytes are fetched.
  /// `changed_config`: what warnings say about a config that has changed. Throws io if checksums.json is damaged.
  explicit Checksums(const std::string& folder, std::string changed_config = "it is taken as it is now");
  ~Checksums();
  /// Verifies files at or below the relative path `part` (empty: all). Throws io for the first file that is missing or
  /// has other bytes than recorded.
  void verify(const std::string& part = "", ChecksumsOf which = ChecksumsOf::all);
  /// Like verify, but compares sizes only.
  void verify_sizes(const std::string& part) const;
  /// Warns of each config that has changed; in a bucket only sizes are compared.
  void warn_of_configs();
  /// Verifies the chunks of one file that hold its bytes [begin, end), each once; the whole file if the list has no
  /// chunks. Bytes beyond the end of the file are ignored.
  void verify_bytes(const std::string& name, uint64_t begin, uint64_t end);
  /// Verifies the header of a .safetensors file.
  void verify_header(const std::string& name);
  /// Fetches ranges that will be verified from a bucket, many at once.
  void fetch(const std::vector<CheckpointFiles::Range>& ranges) { files_.fetch(ranges, chunk_bytes_); }
  /// Bytes that verify_bytes has read: whole chunks; without a list, the requested bytes. For a bucket, the bytes of
  /// arrays that were fetched.
  uint64_t bytes_read() const { return files_.remote() ? files_.bytes_fetched() : bytes_read_; }
  CheckpointFiles& files() { return files_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }

 private:
  /// Throws io; warns instead if the file is a config.
  void refuse(const std::string& name, const std::string& found, const std::string& expected) const;
  /// Whether the size is the recorded one. Returns false, after a warning, for a config of another size; throws for
  /// other files.
  bool verify_size(const std::string& name, const FileChecksum& recorded) const;
  void verify_file(const std::string& name, const FileChecksum& recorded);

  CheckpointFiles files_;
  std::string changed_config_;
  uint64_t chunk_bytes_ = kChunkBytes, bytes_read_ = 0;
  FileChecksums recorded_;
  std::map<std::string, std::vector<bool>> passed_;  // by file, which chunks are verified
};

/// As Checksums::verify.
void verify_checksums(const std::string& folder, const std::string& part = "", ChecksumsOf which = ChecksumsOf::all);
/// Whether the file `path` has the bytes that `checksums`, the text of a checksums.json, records for `name`.
bool matches_checksums(const std::string& path, const std::string& name, const std::string& checksums);
/// verify_checksums for a component's folder, or a file in one, if it is in a checkpoint.
void verify_component(const std::string& path);

}  // namespace md
