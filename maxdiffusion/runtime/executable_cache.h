// Compiled programs on disk. An entry that is damaged or unreadable is a warning and a miss, never a failure. When the
// folder outgrows its limit, the entries longest unused go.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace md {

class ExecutableCache {
 public:
  /// `folder`: "" is $XDG_CACHE_HOME/maxdiffusion or ~/.cache/maxdiffusion, "off" caches nothing.
  /// `limit`: bytes of all entries together.
  explicit ExecutableCache(const std::string& folder, uint64_t limit = uint64_t{8} << 30);
  std::optional<std::string> get(const std::string& key) const;
  void put(const std::string& key, std::string_view executable) const;
  /// Where the entry of `key` lies; "" when off.
  std::string path(const std::string& key) const;

 private:
  void trim() const;
  std::string folder_;
  uint64_t limit_;
};

}  // namespace md
