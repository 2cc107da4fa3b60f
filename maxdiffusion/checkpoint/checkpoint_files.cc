#include "maxdiffusion/checkpoint/checkpoint_files.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostTogether = uint64_t{8} << 20;  // bytes of one request
constexpr int kRequests = 16;                          // concurrent requests

}  // namespace

CheckpointFiles::CheckpointFiles(const std::string& folder) : folder_(folder), remote_(is_remote(folder)) {
  if (!remote_) return;
  const size_t root = split_location(below(folder, "")).path.size();
  for (FoundFile& f : list_all_files(folder))
    found_.emplace(split_location(f.location).path.substr(root), std::move(f));
}

std::string CheckpointFiles::path_of(const std::string& name) const {
  return remote_ ? shown(below(folder_, name)) : folder_ + "/" + name;
}

std::optional<uint64_t> CheckpointFiles::size(const std::string& name) const {
  if (remote_) {
    const auto found = found_.find(name);
    return found == found_.end() ? std::nullopt : std::optional(static_cast<uint64_t>(found->second.size));
  }
  std::error_code ec;
  const auto bytes = fs::file_size(path_of(name), ec);
  return ec ? std::nullopt : std::optional<uint64_t>(bytes);
}

std::vector<std::string> CheckpointFiles::in(const std::string& folder) const {
  std::vector<std::string> names;
  for (const auto& [name, found] : found_)
    if (fs::path(name).parent_path() == folder) names.push_back(name);
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(remote_ ? "" : path_of(folder), ec))
    if (f.is_regular_file()) names.push_back(folder + "/" + f.path().filename().string());
  std::ranges::sort(names);
  return names;
}

const std::string& CheckpointFiles::text(const std::string& name) {
  const auto known = texts_.find(name);
  if (known != texts_.end()) return known->second;
  if (!remote_) return texts_[name] = read_file(path_of(name));
  const auto found = found_.find(name);
  check(found != found_.end(), Code::io, "read '{}': there is no such file", path_of(name));
  return texts_[name] = std::string(get_range(*open_input(found->second), 0, found->second.size).bytes);
}

CheckpointFiles::Memory& CheckpointFiles::memory(const std::string& name) {
  const auto known = memory_.find(name);
  if (known != memory_.end()) return known->second;
  Memory m;
  if (!remote_) {
    m.map = map_file(path_of(name));
    return memory_[name] = std::move(m);
  }
  const auto found = found_.find(name);
  check(found != found_.end(), Code::io, "read '{}': there is no such file", path_of(name));
  m.input = open_input(found->second);
  if (const auto size = static_cast<size_t>(found->second.size); size > 0) {
    void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(at != MAP_FAILED, Code::io, "read '{}': no address space for {} bytes: {}", path_of(name), size,
          std::strerror(errno));
    m.data = static_cast<std::byte*>(at);
    m.map = {std::shared_ptr<const void>(at, [size](const void* p) { ::munmap(const_cast<void*>(p), size); }), m.data,
             size};
  }
  return memory_[name] = std::move(m);
}

const MappedFile& CheckpointFiles::map(const std::string& name) { return memory(name).map; }

void CheckpointFiles::let_go() const {
  for (const auto& [name, m] : memory_)
    if (!remote_) release_pages(m.map.data, m.map.size);
}

void CheckpointFiles::fetch(const std::vector<Range>& ranges, uint64_t chunk_bytes) {
  if (!remote_) return;
  std::map<Memory*, std::vector<uint64_t>> chunks;
  for (const Range& r : ranges) {
    Memory& m = memory(r.name);
    const uint64_t end = std::min<uint64_t>(r.end, m.map.size);
    if (r.begin >= end) continue;
    m.fetched.resize((m.map.size - 1) / chunk_bytes + 1);
    for (uint64_t i = r.begin / chunk_bytes; i <= (end - 1) / chunk_bytes; ++i)
      if (!m.fetched[i]) chunks[&m].push_back(i);
  }
  struct Get {
    Memory* memory;
    uint64_t begin, end;
  };
  std::vector<Get> gets;
  for (auto& [m, list] : chunks) {
    std::ranges::sort(list);
    list.erase(std::unique(list.begin(), list.end()), list.end());
    for (uint64_t i : list) {
      const uint64_t begin = i * chunk_bytes, end = begin + std::min<uint64_t>(chunk_bytes, m->map.size - begin);
      const bool goes_on = !gets.empty() && gets.back().memory == m && gets.back().end == begin &&
                           end - gets.back().begin <= kMostTogether;
      if (goes_on)
        gets.back().end = end;
      else
        gets.push_back({m, begin, end});
    }
  }
  parallel_for(
      std::ssize(gets),
      [&](int64_t i, int) {
        const Get& g = gets[static_cast<size_t>(i)];
        const Blob blob =
            get_range(*g.memory->input, static_cast<int64_t>(g.begin), static_cast<int64_t>(g.end - g.begin));
        std::memcpy(g.memory->data + g.begin, blob.bytes.data(), blob.bytes.size());
      },
      kRequests);
  for (const auto& [m, list] : chunks)
    for (uint64_t i : list) m->fetched[i] = true;
  for (const Get& g : gets) bytes_fetched_ += g.end - g.begin;
}

}  // namespace md
