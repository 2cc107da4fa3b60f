// Compiled programs on disk, and hashes of the plugins that compiled them. A corrupt or unreadable entry is a warning
// and a miss, never an error. Beyond the size limit, the least recently used entries are removed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace md {

class ExecutableCache {
 public:
  /// `folder`: "" is $XDG_CACHE_HOME/maxdiffusion or ~/.cache/maxdiffusion, "off" caches nothing. A folder in an object
  /// store has a local copy (storage/local_cache.h): missing entries are downloaded, new ones uploaded. `limit`: total
  /// bytes of local entries.
  explicit ExecutableCache(const std::string& folder, uint64_t limit = uint64_t{8} << 30);
  std::optional<std::string> get(const std::string& key) const;
  void put(const std::string& key, std::string_view executable) const;
  /// put() without the upload.
  void keep(const std::string& key, std::string_view executable) const;
  /// Hash of a file's bytes. Cached in the folder while inode, size and times of the file are unchanged: hashing a
  /// plugin of 250 MB takes 0.15 s from memory and 2 s from disk.
  std::string hash_of_file(const std::string& path) const;
  /// Local path of the entry of `key`; "" if the cache is off.
  std::string path(const std::string& key) const;

 private:
  void trim() const;
  std::string folder_, place_;  // place_: in an object store, or ""
  uint64_t limit_;
};

}  // namespace md
