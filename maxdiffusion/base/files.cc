#include "maxdiffusion/base/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/file_errors.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/base/new_files.h"

namespace md {
namespace {

std::atomic<WriteHook> write_hook = nullptr;

[[noreturn]] void fail_io(std::string_view act, const std::string& path, int error = errno) {
  throw io_error(act, path, error);
}

void call_hook(const std::string& path, size_t bytes) {
  if (WriteHook hook = write_hook) hook(path, bytes);
}

/// Calls make(name) with new names next to `path` until it returns no −1 of EEXIST; returns what it returned.
template <class Make>
int make_new(const std::string& path, std::string& name, const Make& make) {
  static std::atomic<int64_t> made = 0;
  int result = -1;
  do {
    name = fmt::format("{}.tmp-{}-{}", path, ::getpid(), made++);
    result = make(name.c_str());
  } while (result < 0 && errno == EEXIST);
  return result;
}

/// Opens a new file next to `path` to write; −1: errno says why not.
int open_new(const std::string& path, std::string& name) {
  return make_new(path, name, [](const char* file) {
    return ::open(file, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  });
}

/// Whether an error is of this process, not of what a path names.
bool is_of_process(int error) {
  return error == EACCES || error == EPERM || error == EMFILE || error == ENFILE || error == ENOMEM || error == ESTALE;
}

std::string folder_of(const std::string& path) {
  std::string f = std::filesystem::path(path).parent_path().string();
  return f.empty() ? "." : f;
}

/// Memory maps of files, by start address. Never destroyed: arrays that borrow from one may outlive static objects.
struct Maps {
  std::mutex mutex;
  std::map<uintptr_t, size_t> bytes;
};
Maps& maps() {
  static auto& maps = *new Maps;
  return maps;
}

constexpr size_t kWritten = size_t{64} << 20;  // bytes between requests to start writing to disk

}  // namespace

Error io_error(std::string_view act, const std::string& path, int error) {
  Error e(Code::io, fmt::format("{} '{}': {}", act, path, std::strerror(error)));
  if (error == ENOSPC || error == EDQUOT) e.note("try: free space on the disk that holds this path, then run again");
  if (error == EMFILE) e.note("try: a larger limit on open files (ulimit -n 4096), then run again");
  if (error == ENFILE) e.note("try: fewer programs at a time: the machine has no file handles left");
  if (error == EACCES || error == EPERM || error == EROFS)
    e.note("try: another folder, or the permissions of this one (ls -ld): this user may not do that here");
  if (error == EFBIG) e.note("try: a larger limit on the size of files (ulimit -f), then run again");
  return e;
}

void set_write_hook(WriteHook hook) { write_hook = hook; }

void sync_folder(const std::string& folder) {
  call_hook(folder, 0);
  int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_io("open folder", folder);
  int rc = ::fsync(fd);
  int error = errno;
  ::close(fd);
  if (rc != 0) fail_io("fsync folder", folder, error);
}

int open_to_read(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // open(2) of a FIFO would wait for a writer
  if (fd < 0) fail_io("open", path);
  struct stat st {};
  const bool regular = ::fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
  if (!regular) ::close(fd);
  check(regular, Code::io, "read '{}': not a regular file", path);
  return fd;
}

MappedFile map_file(const std::string& path) {
  const int fd = open_to_read(path);
  MappedFile m;
  m.size = static_cast<size_t>(::lseek(fd, 0, SEEK_END));
  if (m.size == 0) {
    ::close(fd);
    return m;
  }
  void* p = ::mmap(nullptr, m.size, PROT_READ, MAP_PRIVATE, fd, 0);
  int error = errno;
  ::close(fd);
  if (p == MAP_FAILED) fail_io("map", path, error);
  const auto address = reinterpret_cast<uintptr_t>(p);
  {
    const std::lock_guard lock(maps().mutex);
    maps().bytes[address] = m.size;
  }
  m.owner = std::shared_ptr<const void>(p, [size = m.size, address](const void* q) {
    const std::lock_guard lock(maps().mutex);
    maps().bytes.erase(address);
    ::munmap(const_cast<void*>(q), size);
  });
  m.data = static_cast<const std::byte*>(p);
  return m;
}

void read_chunks(const std::string& path, size_t most, const std::function<void(std::string_view)>& take) {
  std::string part(most, '\0');
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail_io("open", path);
  const std::shared_ptr<const void> closed(nullptr, [fd](const void*) { ::close(fd); });
  for (size_t filled = 0;;) {
    const ssize_t n = ::read(fd, part.data() + filled, most - filled);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("read", path);
    filled += static_cast<size_t>(n);
    if (n > 0 && filled < most) continue;
    if (filled > 0) take(std::string_view(part).substr(0, filled));
    if (n == 0) return;
    filled = 0;
  }
}

std::string read_file(const std::string& path) {
  MappedFile m = map_file(path);
  return std::string(reinterpret_cast<const char*>(m.data), m.size);
}

bool exists(const std::string& path) {
  std::error_code ec;
  return std::filesystem::exists(path, ec);
}

void make_folders(const std::string& path) {
  std::error_code ec;
  std::filesystem::create_directories(path, ec);
  if (ec) fail_io("make folder", path, ec.value());
}

void check_writable(const std::string& folder, std::string_view key) {
  std::error_code ec;
  std::filesystem::path existing = std::filesystem::absolute(folder);
  while (!std::filesystem::exists(existing, ec) && existing.has_relative_path()) existing = existing.parent_path();
  try {
    check(std::filesystem::is_directory(existing, ec), Code::io, "write into '{}': not a folder", existing.string());
    std::string probe;
    const int fd = open_new(existing / ".writable", probe);
    if (fd < 0) fail_io("write into", existing);
    const bool written = ::write(fd, "x", 1) == 1;
    const int error = errno;
    ::close(fd);
    ::unlink(probe.c_str());
    if (!written) fail_io("write into", existing, error);
  } catch (Error& e) {
    throw e.note(fmt::format("{} is '{}'", key, folder));
  }
}

FileWriter::FileWriter(const std::string& path, Open mode) : path_(path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0 && S_ISFIFO(st.st_mode)) fail(Code::io, "write '{}': not a regular file", path);
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (mode == Open::append ? O_APPEND : O_TRUNC), 0644);
  if (fd_ < 0) fail_io("create", path);
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void FileWriter::write(const void* data, size_t size) {
  const char* p = static_cast<const char*>(data);
  while (size > 0) {
    size_t chunk = std::min(size, kWritten);
    call_hook(path_, chunk);
    ssize_t n = ::write(fd_, p, chunk);
    if (n < 0) {
      if (errno == EINTR) continue;
      fail_io("write", path_);
    }
    // Starts writing to disk now, not at close(), so that little is pending then.
    const auto end = static_cast<size_t>(std::max<off_t>(::lseek(fd_, 0, SEEK_CUR), n)),
               begin = end - static_cast<size_t>(n);
    if (end / kWritten > begin / kWritten) ::sync_file_range(fd_, 0, 0, SYNC_FILE_RANGE_WRITE);
    p += n;
    size -= static_cast<size_t>(n);
  }
}

void FileWriter::close() {
  call_hook(path_, 0);
  if (::fsync(fd_) != 0) fail_io("fsync", path_);
  int rc = ::close(fd_);
  fd_ = -1;
  if (rc != 0) fail_io("close", path_);
}

void rename_durable(const std::string& from, const std::string& to) {
  call_hook(to, 0);
  if (::rename(from.c_str(), to.c_str()) != 0) fail_io("rename", from + "' to '" + to);
  sync_folder(folder_of(to));
}

namespace {

/// With maps().mutex held.
bool in_a_map(uintptr_t begin, size_t bytes) {
  auto map = maps().bytes.upper_bound(begin);
  if (bytes == 0 || map == maps().bytes.begin()) return false;
  --map;
  return begin + bytes <= map->first + map->second;
}

}  // namespace

bool is_mapped(const void* data, size_t bytes) {
  const std::lock_guard lock(maps().mutex);
  return in_a_map(reinterpret_cast<uintptr_t>(data), bytes);
}

void release_pages(const void* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(data);
  const std::lock_guard lock(maps().mutex);
  if (!in_a_map(begin, bytes)) return;
  const uintptr_t before = begin % page;  // bytes of the first page before `begin`
  ::madvise(const_cast<std::byte*>(static_cast<const std::byte*>(data)) - before, before + bytes, MADV_DONTNEED);
}

HostArray cast_and_release(const HostArray& a, DType to) {
  HostArray out = a.cast(to);
  if (out.data() != a.data()) release_pages(a.data(), a.bytes());
  return out;
}

std::string new_file_next_to(const std::string& path) {
  std::string name;
  const int fd = open_new(path, name);
  if (fd < 0) fail_io("create", name);
  ::close(fd);
  return name;
}

std::string new_folder_next_to(const std::string& path) {
  make_folders(folder_of(path));
  std::string name;
  if (make_new(path, name, [](const char* folder) { return ::mkdir(folder, 0777); }) != 0) fail_io("make folder", name);
  return name;
}

std::optional<Error> unreadable_in(const std::string& folder) {
  const auto error_of = [](const std::string& path) -> std::optional<Error> {
    const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    const int error = fd < 0 ? errno : 0;
    if (fd >= 0) ::close(fd);
    return is_of_process(error) ? std::optional(io_error("open", path, error)) : std::nullopt;
  };
  std::optional<Error> found = error_of(folder);
  std::error_code ec;
  for (std::filesystem::recursive_directory_iterator at(folder, ec), end; !found && !ec && at != end; at.increment(ec))
    found = error_of(at->path());
  return found;
}

void replace_file(const std::string& path, const std::function<void(const std::string& temporary)>& write) {
  const std::string temporary = new_file_next_to(path);
  try {
    write(temporary);
    rename_durable(temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

void write_file_atomic(const std::string& path, std::string_view content) {
  const WholeFile whole;
  replace_file(path, [&](const std::string& temporary) {
    FileWriter w(temporary);
    w.write(content.data(), content.size());
    w.close();
  });
}

namespace {

std::string digits(XXH128_hash_t h) { return fmt::format("{:016x}{:016x}", h.high64, h.low64); }

}  // namespace

std::string content_hash(std::string_view bytes) { return digits(XXH3_128bits(bytes.data(), bytes.size())); }

struct RunningHash::State {
  XXH3_state_t* hash = XXH3_createState();
  ~State() { XXH3_freeState(hash); }
};

RunningHash::RunningHash() : state_(std::make_unique<State>()) { XXH3_128bits_reset(state_->hash); }
RunningHash::~RunningHash() = default;
void RunningHash::add(std::string_view bytes) { XXH3_128bits_update(state_->hash, bytes.data(), bytes.size()); }
std::string RunningHash::digest() const { return digits(XXH3_128bits_digest(state_->hash)); }

}  // namespace md
