// Compiled programs on disk, and hashes of the plugins that compiled them. An entry that is damaged or unreadable is a
// warning and a miss, never a failure. When the folder outgrows its limit, the entries longest unused go.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace md {

class ExecutableCache {
 public:
  /// `folder`: "" is $XDG_CACHE_HOME/maxdiffusion or ~/.cache/maxdiffusion, "off" caches nothing. One in a bucket has a
  /// copy on this machine (storage/local_cache.h): entries that are not in it are looked for in the bucket, and new
  /// ones are put there too. `limit`: bytes of all entries together, on this machine.
  explicit ExecutableCache(const std::string& folder, uint64_t limit = uint64_t{8} << 30);
  std::optional<std::string> get(const std::string& key) const;
  void put(const std::string& key, std::string_view executable) const;
  /// put() on this machine alone.
  void keep(const std::string& key, std::string_view executable) const;
  /// Hash of a file's bytes. Kept in the folder, and taken from there while inode, size and times of the file are the
  /// same: plugins have 250 MB and more, which takes 0.15 s in memory and 2 s from disk.
  std::string hash_of_file(const std::string& path) const;
  /// Where the entry of `key` lies on this machine; "" when off.
  std::string path(const std::string& key) const;

 private:
  void trim() const;
  std::string folder_, place_;  // place_: in a bucket, or ""
  uint64_t limit_;
};

}  // namespace md
