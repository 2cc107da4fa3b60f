// Files to read; location.h says how they are named. Every error is io and names the location without key and secret.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/storage/location.h"

namespace md {

/// Bytes and their owner.
struct Blob {
  std::shared_ptr<const void> owner;
  std::string_view bytes;
  static Blob of(std::string text);
};

/// A file for random access. Thread safe.
class InputFile {
 public:
  virtual ~InputFile() = default;
  /// The location, for messages.
  virtual const std::string& name() const = 0;
  virtual int64_t size() const = 0;
  /// The bytes [offset, offset + size). Throws io if the file ends before.
  virtual Blob read(int64_t offset, int64_t size) const = 0;
  /// Whether the file is memory-mapped: small random reads are cheap.
  virtual bool local() const = 0;
};

/// A file in a listing.
struct FoundFile {
  std::string location;
  int64_t size = 0, modified = 0;  // bytes; ns since 1970, as far as the storage knows
  int64_t changed = 0;             // ns since 1970: ctime, which no program can set; 0: not known
};

/// Local files are mapped into memory; remote ones are read by ranges.
std::shared_ptr<const InputFile> open_input(const std::string& location);
/// As open_input; uses the listing's size instead of a request to a remote storage.
std::shared_ptr<const InputFile> open_input(const FoundFile& file);
/// Every file below a folder, or the file itself, sorted, as list_inputs(). Empty if it does not exist or is empty.
/// Throws io if a remote location does not exist.
std::vector<FoundFile> list_files(const std::string& location);
/// Several locations separated by commas. Local files and folders that exist may have commas in their names: the
/// longest name is taken.
std::vector<std::string> split_locations(const std::string& locations);
/// The files of each of split_locations(), sorted: one file; every file below a folder (except names that start with a
/// dot); or the matches of a pattern with *, ? or [ (** also crosses folders), unless it is the name of a local file or
/// folder. Throws io if one of them names no file.
std::vector<FoundFile> list_inputs(const std::string& locations);
/// Created in main before any read: its destructor ends the threads and connections of object stores, as their
/// libraries require. No InputFile may outlive it.
class RemoteScope {
 public:
  RemoteScope() = default;
  RemoteScope(const RemoteScope&) = delete;
  ~RemoteScope();
};
/// A short hash of the names, sizes and times of files.
std::string fingerprint_of(const std::vector<FoundFile>& files);
/// A short hash of the names, without folders, and sizes of files.
std::string names_and_sizes(const std::vector<FoundFile>& files);

}  // namespace md
