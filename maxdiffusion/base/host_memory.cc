#include "maxdiffusion/base/host_memory.h"

#include <fmt/core.h>

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <vector>

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

/// The number in a file; none if it is "max" or the file is missing.
std::optional<int64_t> number_in(const fs::path& file) {
  int64_t number = 0;
  if (std::ifstream in(file); in >> number) return number;
  return {};
}

/// The number after a word at the start of a line; 0 if there is no such line.
int64_t number_after(const fs::path& file, const std::string& word) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(word) && line.size() > word.size()) {
      const size_t digit = line.find_first_of("0123456789", word.size());
      if (digit != std::string::npos) return std::stoll(line.substr(digit));
    }
  return 0;
}

struct Memory {
  int64_t limit = kNoLimit, free = kNoLimit;
  void take(int64_t of_limit, int64_t of_free) {
    limit = std::min(limit, of_limit);
    free = std::min(free, std::max<int64_t>(of_free, 0));
  }
};

/// Reads the limits of a cgroup and its ancestors, version 1 or 2.
void read_cgroups(Memory& m, const fs::path& root, const std::string& cgroup, bool second) {
  const char *limit = second ? "memory.max" : "memory.limit_in_bytes",
             *usage = second ? "memory.current" : "memory.usage_in_bytes", *prefix = second ? "" : "total_";
  const auto files = [&](const fs::path& at) {  // page cache, which is reclaimable
    return number_after(at / "memory.stat", prefix + std::string("inactive_file ")) +
           number_after(at / "memory.stat", prefix + std::string("active_file "));
  };
  for (fs::path at = root / fs::path(cgroup).relative_path();; at = at.parent_path()) {
    if (const auto most = number_in(at / limit)) m.take(*most, *most - number_in(at / usage).value_or(0) + files(at));
    if (at == root || at.string().size() <= root.string().size()) return;
  }
}

Memory memory() {
  Memory m;
  m.take(sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), number_after("/proc/meminfo", "MemAvailable:") * 1024);
  rlimit space{};
  if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
    const auto most = static_cast<int64_t>(space.rlim_cur);
    m.take(most, most - status_bytes("VmSize"));
  }
  std::ifstream groups("/proc/self/cgroup");  // "0::/path" of version 2, "4:memory:/path" of version 1
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), last = line.find(':', first + 1);
    if (first == std::string::npos || last == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, last - first - 1) + ",", path = line.substr(last + 1);
    if (controllers == ",,") read_cgroups(m, "/sys/fs/cgroup", path, true);
    if (controllers.find(",memory,") != std::string::npos) read_cgroups(m, "/sys/fs/cgroup/memory", path, false);
  }
  return m;
}

}  // namespace

int64_t memory_limit() { return memory().limit; }
int64_t free_memory() { return memory().free; }
int64_t status_bytes(const std::string& field) { return number_after("/proc/self/status", field + ":") * 1024; }

std::string bytes_text(int64_t bytes) {
  const double mib = static_cast<double>(bytes) / (1 << 20);
  return mib < 1024 ? fmt::format("{:.1f} MiB", mib) : fmt::format("{:.2f} GiB", mib / 1024);
}

}  // namespace md
