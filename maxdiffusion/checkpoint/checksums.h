// What the bytes of a checkpoint's files were when it was written: training_state/checksums.json,
//
//   {"algorithm": "XXH3-128", "chunk_bytes": 1048576, "files": {"unet/diffusion_pytorch_model.safetensors":
//     {"bytes": 10270077736, "hash": "…", "chunks": ["…", "…", …]}}}
//
// with hashes as `xxhsum -H2` prints them, of the file and, for arrays, of each of its chunks, so that a reader of a
// part of a file compares that part. It names every file of the checkpoint but itself.
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
  std::vector<std::string> chunks;  // of arrays
};
/// By path relative to the checkpoint's folder.
using FileChecksums = std::map<std::string, FileChecksum>;

/// Relative paths of all files below `folder`.
std::set<std::string> files_under(const std::string& folder);
/// Of these files of a folder. One that this process has hashed before (a link of it in an earlier checkpoint) is not
/// read again.
FileChecksums checksums_of(const std::string& folder, const std::set<std::string>& names,
                           uint64_t chunk_bytes = kChunkBytes);
FileChecksum checksum_of_text(const std::string& text);
/// The text of checksums.json.
std::string to_json(const FileChecksums& files, uint64_t chunk_bytes = kChunkBytes);
/// Throws io naming `file`, from which the text is, and the entry that is damaged.
FileChecksums parse_checksums(const std::string& text, const std::string& file, uint64_t* chunk_bytes = nullptr);

enum class ChecksumsOf { all, all_but_weights };

/// The files of one checkpoint, and what its list says of them. Older checkpoints, and folders that are none, have no
/// list: nothing is compared then. Errors are io and name the file of the checkpoint. Configs (model_index.json,
/// config.json, scheduler_config.json, …) are for people to change: one that has changed is a warning. Not thread safe.
class Checksums {
 public:
  /// `folder`: of this machine or in a bucket, of which only what is compared is fetched. Throws where the list itself
  /// is damaged.
  /// `changed_config`: what warnings say of a config that has changed.
  explicit Checksums(const std::string& folder, std::string changed_config = "it is taken as it is now");
  ~Checksums();
  /// Throws for the first file at or below the relative path `part` (empty: any) that is missing, or whose bytes are
  /// not those that were written.
  void verify(const std::string& part = "", ChecksumsOf which = ChecksumsOf::all);
  /// The same for its size alone.
  void verify_sizes(const std::string& part) const;
  /// Warns of each config that has changed; of a bucket, by its size alone.
  void warn_of_configs();
  /// Compares the chunks of one file that hold its bytes [begin, end), each once; where the list has no chunks, the
  /// file. Bytes beyond the end of the file are ignored.
  void verify_bytes(const std::string& name, uint64_t begin, uint64_t end);
  /// That of what says how a .safetensors file is laid out.
  void verify_header(const std::string& name);
  /// Brings what will be verified, of a bucket: many ranges at once.
  void fetch(const std::vector<CheckpointFiles::Range>& ranges) { files_.fetch(ranges, chunk_bytes_); }
  /// What verify_bytes has read: whole chunks; without a list, the requested bytes. Of a bucket, what was
  /// fetched of arrays.
  uint64_t bytes_read() const { return files_.remote() ? files_.bytes_fetched() : bytes_read_; }
  CheckpointFiles& files() { return files_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }

 private:
  /// Throws, or warns of a config.
  void refuse(const std::string& name, const std::string& found, const std::string& expected) const;
  /// Whether the size is right; false: of a config, which has been warned of.
  bool verify_size(const std::string& name, const FileChecksum& recorded) const;
  void verify_file(const std::string& name, const FileChecksum& recorded);

  CheckpointFiles files_;
  std::string changed_config_;
  uint64_t chunk_bytes_ = kChunkBytes, bytes_read_ = 0;
  FileChecksums recorded_;
  std::map<std::string, std::vector<bool>> passed_;  // chunks
};

/// Checksums::verify.
void verify_checksums(const std::string& folder, const std::string& part = "", ChecksumsOf which = ChecksumsOf::all);
/// Whether the file `path` has the bytes that a text of checksums.json says `name` has.
bool matches_checksums(const std::string& path, const std::string& name, const std::string& checksums);
/// verify_checksums for a component's folder, or a file in one, if it is in a checkpoint.
void verify_component(const std::string& path);

}  // namespace md
