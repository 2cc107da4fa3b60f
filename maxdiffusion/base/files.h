// Files: whole reads, atomic replacement, memory maps. All errors are io and name the path.
// Writing goes through one table of functions that tests replace (full disk, failing fsync).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace md {

std::string read_file(const std::string& path);
/// A descriptor, which the caller closes. Throws io unless it is a regular file; does not block on a FIFO.
int open_to_read(const std::string& path);
bool exists(const std::string& path);
void make_folders(const std::string& path);
/// Throws io, with a note naming `key`, if the folder, or the parent in which it would be created, is not writable.
void check_writable(const std::string& folder, std::string_view key);

/// Replaces `path` by the whole new file that write(temporary name) leaves in the same folder: rename, fsync of the
/// folder. Its content is to be on the disk then (FileWriter::close). Whatever is thrown, no temporary file stays.
/// Several threads may replace one file at once.
void replace_file(const std::string& path, const std::function<void(const std::string& temporary)>& write);
/// replace_file with `content`; a signal ends the process only after it.
void write_file_atomic(const std::string& path, std::string_view content);

/// Writes a file in order. close() fsyncs. Without close(), the partial file stays; use a temporary name if readers
/// must not see it. Throws io, naming the path, if the disk is full.
class FileWriter {
 public:
  enum class Open { truncate, append };
  explicit FileWriter(const std::string& path, Open mode = Open::truncate);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  void write(const void* data, size_t size);
  void close();

 private:
  std::string path_;
  int fd_ = -1;
};
/// rename(2), then fsync of the target folder.
void rename_durable(const std::string& from, const std::string& to);
/// fsync of a folder: its entries survive a power failure.
void sync_folder(const std::string& folder);

struct MappedFile {
  std::shared_ptr<const void> owner;
  const std::byte* data = nullptr;
  size_t size = 0;
};
MappedFile map_file(const std::string& path);
/// Calls take(bytes) for consecutive chunks of a file, without mapping it. Each chunk has `most` bytes, the last may
/// have fewer.
void read_chunks(const std::string& path, size_t most, const std::function<void(std::string_view)>& take);

/// Hash of bytes (xxHash3, 128 bits) as 32 hex digits; for caches and fingerprints.
std::string content_hash(std::string_view bytes);
/// content_hash of bytes that are added in chunks.
class RunningHash {
 public:
  RunningHash();
  ~RunningHash();
  RunningHash(const RunningHash&) = delete;
  void add(std::string_view bytes);
  std::string digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Test hook: called before each write of `bytes` to `path`, and with 0 bytes before each fsync (of a file or folder)
/// and rename (with the new name); throw to fail it, as a full disk would.
using WriteHook = void (*)(const std::string& path, size_t bytes);
void set_write_hook(WriteHook hook);

}  // namespace md
