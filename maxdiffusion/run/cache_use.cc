#include "maxdiffusion/run/cache_use.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

namespace fs = std::filesystem;

// FOLDER/used/RUN/WHAT.txt: the run's folder, and a line for each item. WHAT.new.txt: the same of a start whose data is
// not open yet.
constexpr const char *kUsed = "used", *kRun = "run ", *kNew = ".new.txt", *kList = ".txt";

std::string absolute(const std::string& run) {
  return is_remote(run) ? run : fs::absolute(run).lexically_normal().string();
}
std::string lists_of(const CachePlace& cache) {
  return below(below(cache.folder, kUsed), content_hash(absolute(cache.run)));
}

/// What all runs use. `remove`: removes the lists of runs that do not exist any more.
std::unordered_set<std::string> used_items(const std::string& folder, bool remove) {
  std::unordered_set<std::string> all;
  for (const FoundFile& list : list_all_files(below(folder, kUsed))) {
    std::istringstream lines(get_text(list.location));
    std::string line;
    std::getline(lines, line);
    const std::string run = line.starts_with(kRun) ? line.substr(std::string(kRun).size()) : "";
    if (!is_remote(run) && !exists(run)) {
      if (remove) remove_file(list.location);
      continue;
    }
    while (std::getline(lines, line)) all.insert(line);
  }
  return all;
}

std::string megabytes(int64_t bytes) { return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6); }

}  // namespace

void begin_used_items(const CachePlace& cache) {
  if (cache.run.empty()) return;
  for (const FoundFile& list : list_all_files(lists_of(cache)))
    if (list.location.ends_with(kNew)) remove_file(list.location);
}

void record_used_items(const CachePlace& cache, const std::string& what, const std::vector<std::string>& items) {
  if (cache.run.empty()) return;
  const std::string file = below(lists_of(cache), content_hash(what) + kNew);
  if (!is_remote(file)) make_folders(fs::path(file).parent_path());
  put_text(file, fmt::format("{}{}\n{}\n", kRun, absolute(cache.run), fmt::join(items, "\n")));
}

void forget_used_items(const CachePlace& cache) {
  if (cache.run.empty()) return;
  const std::vector<FoundFile> lists = list_all_files(lists_of(cache));
  for (const FoundFile& list : lists)
    if (!list.location.ends_with(kNew)) remove_file(list.location);
  for (const FoundFile& list : lists) {
    if (!list.location.ends_with(kNew)) continue;
    put_text(list.location.substr(0, list.location.size() - std::string(kNew).size()) + kList, get_text(list.location));
    remove_file(list.location);
  }
}

void report_unused_items(const CachePlace& cache) {
  const CachedItems items = unused_items(cache.folder, used_items(cache.folder, false));
  if (items.unused > 0)
    log_info("latent cache {}: {} of {} {} not used by this dataset or another run ({}); try: {} prune_cache {}",
             shown(cache.folder), items.unused, counted(items.all, "cached item"), items.unused == 1 ? "is" : "are",
             megabytes(items.unused_bytes), program_name(), shown(cache.folder));
}

CachedItems prune_cache(const std::string& folder) {
  const auto is_cache = [](const std::string& where) {
    constexpr const char* kKey = "/key.txt";  // of WHERE/CACHE
    return std::ranges::any_of(list_all_files(where), [&](const FoundFile& f) {
      const std::string path = split_location(f.location).path;
      const size_t end = split_location(below(where, "")).path.size();
      return path.ends_with(kKey) && path.find('/', end) == path.size() - std::string(kKey).size();
    });
  };
  const std::string inside = below(folder, "cache");
  const std::string cache = is_cache(inside) ? inside : folder;
  if (!is_cache(cache))
    throw Error(Code::io,
                fmt::format("'{}': no latent cache; expected a cache, or a run's folder that has one", shown(folder)))
        .note("try: the folder that the log names after \"caching latents\"");
  const CachedItems items = unused_items(cache, used_items(cache, true), true);
  log_info("latent cache {}: {} of {} removed, {}", shown(cache), items.unused, counted(items.all, "cached item"),
           megabytes(items.unused_bytes));
  return items;
}

}  // namespace md
