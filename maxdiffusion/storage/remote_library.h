// Files of object stores through Arrow's filesystems, in a separate shared library (maxdiffusion/storage/remote/) that
// is opened when the first gs:// or s3:// location is read or written. Errors are md::Error, io, without key and
// secret. Thread safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/storage/storage.h"

namespace md {

class RemoteLibrary {
 public:
  virtual ~RemoteLibrary() = default;
  /// The file at a location, or every file below it including hidden ones, in any order. Without either: empty, or an
  /// error if `must_exist`.
  virtual std::vector<FoundFile> list(const std::string& location, bool must_exist) const = 0;
  /// `size`: file size from a listing; −1: queries the storage.
  virtual std::shared_ptr<const InputFile> open(const std::string& location, int64_t size) const = 0;
  /// Bytes [offset, offset + size) to write.
  using Source = std::function<std::string(int64_t offset, int64_t size)>;
  /// Creates or replaces a file atomically. Large files are uploaded in parts, a few of which are in memory.
  virtual void write(const std::string& location, int64_t size, const Source& source) const = 0;
  /// Copies a file within a bucket on the server. S3 does not copy files over 5 GB.
  virtual void copy(const std::string& from, const std::string& to) const = 0;
  /// No effect if it does not exist.
  virtual void remove(const std::string& location) const = 0;
  /// Every file below a location.
  virtual void remove_folder(const std::string& location) const = 0;
  /// Ends threads and connections; later calls throw.
  virtual void close() = 0;
};

/// Opens the library on first use. Throws io naming it.
RemoteLibrary& remote_library();
/// Whether it has been opened.
bool remote_library_is_open();

}  // namespace md
