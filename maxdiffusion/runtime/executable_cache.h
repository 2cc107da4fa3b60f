// Compiled programs on disk. An entry that is damaged or unreadable is a warning and a miss, never a failure.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace md {

class ExecutableCache {
 public:
  /// `folder`: "" is $XDG_CACHE_HOME/maxdiffusion or ~/.cache/maxdiffusion, "off" caches nothing.
  explicit ExecutableCache(const std::string& folder);
  std::optional<std::string> get(const std::string& key) const;
  void put(const std::string& key, std::string_view executable) const;
  /// Where the entry of `key` lies; "" when off.
  std::string path(const std::string& key) const;

 private:
  std::string folder_;
};

}  // namespace md
