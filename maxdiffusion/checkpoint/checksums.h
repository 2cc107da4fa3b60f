// What the bytes of a checkpoint's files were when it was written: training_state/checksums.json,
//
//   {"algorithm": "XXH3-128", "chunk_bytes": 1048576, "files": {"unet/diffusion_pytorch_model.safetensors":
//     {"bytes": 10270077736, "hash": "…", "chunks": ["…", "…", …]}}}
//
// with hashes as `xxhsum -H2` prints them, of the file and, for arrays, of each of its chunks, so that whoever reads a
// part of a file compares that part. It names every file of the checkpoint but itself.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/files.h"

namespace md {

inline constexpr const char* kChecksums = "training_state/checksums.json";
inline constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

/// The text of checksums.json for all files below `folder`, and for `more`: texts by relative path that are about to be
/// written. A file that this process has hashed before (a link of it in an earlier checkpoint) is not read again.
std::string checksums_of(const std::string& folder, const std::map<std::string, std::string>& more,
                         uint64_t chunk_bytes = kChunkBytes);

enum class ChecksumsOf { all, all_but_weights };

/// The list of one checkpoint. Older checkpoints, and folders that are none, have none: nothing is compared then.
/// Errors are io and name the file of the checkpoint. Not thread safe.
class Checksums {
 public:
  /// Throws where the list itself is damaged.
  explicit Checksums(const std::string& folder);
  ~Checksums();
  /// Throws for the first file at or below the relative path `part` (empty: any) that is missing, or whose bytes are
  /// not those that were written.
  void verify(const std::string& part = "", ChecksumsOf which = ChecksumsOf::all) const;
  /// Likewise for its size alone.
  void verify_sizes(const std::string& part) const;
  /// Compares the chunks of one file that hold its bytes [begin, end), each once; where the list has no chunks, the
  /// file. Bytes that a file does not have are not asked for.
  void verify_bytes(const std::string& name, uint64_t begin, uint64_t end);
  /// That of what says how a .safetensors file is laid out.
  void verify_header(const std::string& name);
  /// What verify_bytes has read: whole chunks; without a list, the bytes that it was asked for.
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  struct File {
    uint64_t bytes = 0;
    std::string hash;
    std::vector<std::string> chunks;
    MappedFile map;            // when first needed
    std::vector<bool> passed;  // chunks
  };
  [[noreturn]] void refuse(const std::string& path, const std::string& found, const std::string& expected) const;
  void verify_size(const std::string& name, const File& file) const;
  void verify_file(const std::string& name, const File& file) const;
  std::string path_of(const std::string& name) const { return folder_ + "/" + name; }

  std::string folder_, list_;
  uint64_t chunk_bytes_ = kChunkBytes, bytes_read_ = 0;
  std::map<std::string, File> files_;
};

/// Checksums::verify.
void verify_checksums(const std::string& folder, const std::string& part = "", ChecksumsOf which = ChecksumsOf::all);
/// Whether the file `path` has the bytes that a text of checksums.json says `name` has.
bool is_as_said(const std::string& path, const std::string& name, const std::string& checksums);
/// verify_checksums for a component's folder, or a file in one, where that lies in a checkpoint.
void verify_component(const std::string& path);

}  // namespace md
