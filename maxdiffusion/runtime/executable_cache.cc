// Entry KEY.pjrt: a line naming the format, a line with the hash of the rest, then the executable as serialized by the
// plugin. File hash HASH_OF_ITS_PATH.hash: a line naming the format, the file's path, a line with its stat values, the
// hash.
#include "maxdiffusion/runtime/executable_cache.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/user_cache.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char* kExtension = ".pjrt";
constexpr std::string_view kMagic = "maxdiffusion executable 1\n";
constexpr size_t kHashDigits = 32;

}  // namespace

ExecutableCache::ExecutableCache(const std::string& folder, uint64_t limit)
    : folder_(folder == "off"  ? ""
              : folder.empty() ? user_cache_folder()
                               : local_cache_path(folder)),
      place_(is_remote(folder) ? folder : ""),
      limit_(limit) {}

std::string ExecutableCache::path(const std::string& key) const {
  return folder_.empty() ? "" : folder_ + "/" + key + kExtension;
}

std::optional<std::string> ExecutableCache::get(const std::string& key) const {
  const std::string file = path(key);
  if (file.empty() || (place_.empty() && !exists(file))) return {};
  try {
    if (!exists(file)) {
      const auto found = find_file(below(place_, key + kExtension));
      if (!found) return {};
      get_file(*found, file);
    }
    std::string bytes = read_file(file);
    const size_t head = kMagic.size() + kHashDigits + 1;
    const std::string_view view = bytes;
    check(view.size() > head && view.starts_with(kMagic), Code::io, "not an entry of this cache, or truncated");
    check(view.substr(kMagic.size(), kHashDigits) == content_hash(view.substr(head)), Code::io,
          "the contents do not match their hash");
    std::error_code ignored;  // time of last use; see trim()
    fs::last_write_time(file, fs::file_time_type::clock::now(), ignored);
    return bytes.substr(head);
  } catch (const Error& e) {
    log_warning("executable cache: '{}' is ignored: {}", file, e.message());
    return {};
  }
}

void ExecutableCache::put(const std::string& key, std::string_view executable) const {
  keep(key, executable);
  const std::string file = path(key);
  if (place_.empty() || !exists(file)) return;
  try {
    put_file(file, below(place_, key + kExtension));
  } catch (const Error& e) {
    log_warning("executable cache: '{}' is not uploaded: {}", file, e.what());
  }
}

void ExecutableCache::keep(const std::string& key, std::string_view executable) const {
  const std::string file = path(key);
  if (file.empty()) return;
  try {
    make_folders(folder_);
    std::string bytes(kMagic);
    bytes += content_hash(executable);
    bytes += '\n';
    bytes += executable;
    write_file_atomic(file, bytes);
    trim();
  } catch (const std::exception& e) {  // of the file system or this program
    log_warning("executable cache: '{}' is not written: {}", file, e.what());
  }
}

std::string ExecutableCache::hash_of_file(const std::string& path) const {
  struct stat st {};
  check(::stat(path.c_str(), &st) == 0, Code::io, "executable cache: '{}' was removed", path);
  const std::string header =
      fmt::format("maxdiffusion hash 1\n{}\n{} {} {}.{:09} {}.{:09}\n", path, st.st_ino, st.st_size, st.st_mtim.tv_sec,
                  st.st_mtim.tv_nsec, st.st_ctim.tv_sec, st.st_ctim.tv_nsec);
  const std::string hash_file = folder_.empty() ? "" : folder_ + "/" + content_hash(path) + ".hash";
  if (!hash_file.empty() && exists(hash_file)) {
    try {
      const std::string text = read_file(hash_file);
      if (text.size() == header.size() + kHashDigits && text.starts_with(header)) return text.substr(header.size());
    } catch (const Error& e) {
      log_warning("executable cache: '{}' is ignored: {}", hash_file, e.message());
    }
  }
  const MappedFile file = map_file(path);
  std::string hash = content_hash({reinterpret_cast<const char*>(file.data), file.size});
  if (!hash_file.empty()) {
    try {
      make_folders(folder_);
      write_file_atomic(hash_file, header + hash);
    } catch (const Error& e) {
      log_warning("executable cache: '{}' is not written: {}", hash_file, e.message());
    }
  }
  return hash;
}

void ExecutableCache::trim() const {
  struct Entry {
    fs::file_time_type used;
    uint64_t bytes;
    fs::path path;
  };
  std::vector<Entry> entries;
  uint64_t total = 0;
  std::error_code error;  // another process may trim at the same time; missing files are ignored
  for (const auto& e : fs::directory_iterator(folder_, error)) {
    if (e.path().extension() != kExtension) continue;
    Entry entry{e.last_write_time(error), e.file_size(error), e.path()};
    if (error) continue;
    total += entry.bytes;
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (size_t i = 0; i + 1 < entries.size() && total > limit_; ++i) {  // the newest is always kept
    fs::remove(entries[i].path, error);
    total -= entries[i].bytes;
  }
}

}  // namespace md
