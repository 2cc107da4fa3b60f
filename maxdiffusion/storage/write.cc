#include "maxdiffusion/storage/write.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/storage/remote_library.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr int kWriteAttempts = 3;
constexpr milliseconds kFirstPause{250};
constexpr int64_t kChunk = int64_t{16} << 20;

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

/// A local file, with its size at the time of opening.
class Bytes {
 public:
  explicit Bytes(const std::string& path) : path_(path), fd_(open_to_read(path)) {
    struct stat s {};
    ::fstat(fd_, &s);
    size_ = s.st_size;
  }
  ~Bytes() { ::close(fd_); }
  Bytes(const Bytes&) = delete;
  int64_t size() const { return size_; }
  std::string read(int64_t offset, int64_t size) const {
    std::string bytes(static_cast<size_t>(size), '\0');
    for (int64_t got = 0; got < size;) {
      const ssize_t n = ::pread(fd_, bytes.data() + got, static_cast<size_t>(size - got), offset + got);
      if (n < 0 && errno == EINTR) continue;
      check(n > 0, Code::io, "read '{}': {}", path_, n < 0 ? std::strerror(errno) : "it has become shorter");
      got += n;
    }
    return bytes;
  }

 private:
  std::string path_;
  int fd_;
  int64_t size_ = 0;
};

/// Retries a failed operation unless the error is permanent.
void patiently(const std::function<void()>& act) {
  for (int attempt = 1;; ++attempt) {
    try {
      return act();
    } catch (const Error& e) {
      const bool final =
          e.code() != Code::io || attempt == kWriteAttempts ||
          std::ranges::none_of(e.notes(), [](auto& n) { return n.starts_with("after several attempts"); });
      if (final) throw;
      log_info("again: {}", e.message());
    }
    std::this_thread::sleep_for(kFirstPause * (1 << attempt));
  }
}

}  // namespace

void put_text(const std::string& location, std::string_view text) {
  if (!is_remote(location)) {
    make_folders(folder_of(location));
    return write_file_atomic(location, text);
  }
  patiently([&] {
    remote_library().write(location, std::ssize(text), [&](int64_t offset, int64_t size) {
      return std::string(text.substr(static_cast<size_t>(offset), static_cast<size_t>(size)));
    });
  });
}

void put_file(const std::string& file, const std::string& location) {
  const Bytes bytes(file);
  if (is_remote(location)) {
    return patiently([&] {
      remote_library().write(location, bytes.size(),
                             [&](int64_t offset, int64_t size) { return bytes.read(offset, size); });
    });
  }
  make_folders(folder_of(location));
  replace_file(location, [&](const std::string& temporary) {
    FileWriter w(temporary);
    for (int64_t at = 0; at < bytes.size(); at += kChunk) {
      const std::string chunk = bytes.read(at, std::min(kChunk, bytes.size() - at));
      w.write(chunk.data(), chunk.size());
    }
    w.close();
  });
}

void put_file_like(const std::string& same, const std::string& file, const std::string& location) {
  if (is_remote(same) && is_remote(location)) {
    try {
      return remote_library().copy(same, location);
    } catch (const Error& e) {
      log_debug("not copied there: {}", e.message());
    }
  }
  put_file(file, location);
}

std::string get_text(const std::string& location) {
  const auto file = open_input(location);
  return std::string(file->read(0, file->size()).bytes);
}

Blob get_range(const InputFile& file, int64_t offset, int64_t size) {
  Blob bytes;
  patiently([&] { bytes = file.read(offset, size); });
  return bytes;
}

void get_file(const FoundFile& found, const std::string& path) {
  const auto file = open_input(found);
  make_folders(folder_of(path));
  replace_file(path, [&](const std::string& temporary) {
    FileWriter w(temporary);
    for (int64_t at = 0; at < file->size(); at += kChunk) {
      const Blob chunk = get_range(*file, at, std::min(kChunk, file->size() - at));
      w.write(chunk.bytes.data(), chunk.bytes.size());
    }
    w.close();
  });
}

std::optional<FoundFile> find_file(const std::string& location) {
  for (const FoundFile& f : list_all_files(location))
    if (split_location(f.location).path == split_location(location).path) return f;
  return {};
}

std::vector<FoundFile> list_all_files(const std::string& folder) {
  if (is_remote(folder)) return remote_library().list(folder, false);
  std::vector<FoundFile> found;
  std::error_code ec;
  const auto ns = [](const timespec& t) { return t.tv_sec * 1'000'000'000 + t.tv_nsec; };
  const auto add = [&](const fs::path& path) {
    struct stat s {};
    if (::stat(path.c_str(), &s) == 0 && S_ISREG(s.st_mode))
      found.push_back({path.string(), s.st_size, ns(s.st_mtim), ns(s.st_ctim)});
  };
  if (fs::is_regular_file(folder, ec)) add(folder);
  for (fs::recursive_directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec)) add(it->path());
  return found;
}

void remove_file(const std::string& location) {
  if (is_remote(location)) return patiently([&] { remote_library().remove(location); });
  std::error_code ec;
  fs::remove(location, ec);
  check(!ec, Code::io, "remove '{}': {}", location, ec.message());
}

void remove_folder(const std::string& folder) {
  if (is_remote(folder)) return patiently([&] { remote_library().remove_folder(folder); });
  std::error_code ec;
  fs::remove_all(folder, ec);
  check(!ec, Code::io, "remove '{}': {}", folder, ec.message());
}

}  // namespace md
