// Files of buckets through Arrow's filesystems, in a shared library of their own (maxdiffusion/storage/remote/) that is
// opened when the first gs:// or s3:// location is read or written. Errors are md::Error, io, without key and secret.
// Thread safe.
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
  /// The file that a location names, or every file below it, hidden ones too, in no particular order. Where there is
  /// neither, none; or an error, where it `must_exist`.
  virtual std::vector<FoundFile> list(const std::string& location, bool must_exist) const = 0;
  /// `size`: of the file, from a listing; −1: the storage is asked for it.
  virtual std::shared_ptr<const InputFile> open(const std::string& location, int64_t size) const = 0;
  /// Bytes [offset, offset + size) of what is to be written.
  using Source = std::function<std::string(int64_t offset, int64_t size)>;
  /// Makes or replaces a file, whole or not at all. Larger ones go in parts, of which a few are in memory.
  virtual void write(const std::string& location, int64_t size, const Source& source) const = 0;
  /// Copies a file within one bucket without its bytes coming here. S3 copies no file over 5 GB.
  virtual void copy(const std::string& from, const std::string& to) const = 0;
  /// Nothing where it is gone already.
  virtual void remove(const std::string& location) const = 0;
  /// Every file below a location.
  virtual void remove_folder(const std::string& location) const = 0;
  /// Ends threads and connections; whatever is asked afterwards throws.
  virtual void close() = 0;
};

/// Opens the library on first use. Throws io naming it.
RemoteLibrary& remote_library();
/// Whether it has been opened.
bool remote_library_is_open();

}  // namespace md
