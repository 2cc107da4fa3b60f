// Entry: a line naming the format, a line with the hash of the rest, the executable as the plugin serialized it.
#include "maxdiffusion/runtime/executable_cache.h"

#include <cstdlib>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"

namespace md {
namespace {

constexpr std::string_view kMagic = "maxdiffusion executable 1\n";
constexpr size_t kHashDigits = 32;

std::string default_folder() {
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg) return std::string(xdg) + "/maxdiffusion";
  if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + "/.cache/maxdiffusion";
  return "";
}

}  // namespace

ExecutableCache::ExecutableCache(const std::string& folder)
    : folder_(folder == "off"  ? ""
              : folder.empty() ? default_folder()
                               : folder) {}

std::string ExecutableCache::path(const std::string& key) const {
  return folder_.empty() ? "" : folder_ + "/" + key + ".pjrt";
}

std::optional<std::string> ExecutableCache::get(const std::string& key) const {
  const std::string file = path(key);
  if (file.empty() || !exists(file)) return {};
  try {
    std::string bytes = read_file(file);
    const size_t head = kMagic.size() + kHashDigits + 1;
    const std::string_view view = bytes;
    check(view.size() > head && view.starts_with(kMagic), Code::io, "not an entry of this cache, or cut short");
    check(view.substr(kMagic.size(), kHashDigits) == content_hash(view.substr(head)), Code::io,
          "the contents do not match their hash");
    return bytes.substr(head);
  } catch (const Error& e) {
    log_warning("executable cache: '{}' is ignored: {}", file, e.message());
    return {};
  }
}

void ExecutableCache::put(const std::string& key, std::string_view executable) const {
  const std::string file = path(key);
  if (file.empty()) return;
  try {
    make_folders(folder_);
    std::string bytes(kMagic);
    bytes += content_hash(executable);
    bytes += '\n';
    bytes += executable;
    write_file_atomic(file, bytes);
  } catch (const Error& e) {
    log_warning("executable cache: '{}' is not written: {}", file, e.message());
  }
}

}  // namespace md
