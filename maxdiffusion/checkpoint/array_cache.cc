#include "maxdiffusion/checkpoint/array_cache.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

namespace fs = std::filesystem;

// Keys of a part's metadata.
constexpr const char *kItems = "items", *kChecksum = "checksum";
constexpr const char *kKeyFile = "key.txt", *kAnyVersion = "latent cache ", *kThisVersion = "latent cache 3\n";

std::string checksum_of(const HostArrays& arrays, const std::string& items) {
  std::string all = items;
  for (const auto& [name, a] : arrays)
    all += fmt::format("\n{} {} {}", name, to_string(a.shape()),
                       content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()}));
  return content_hash(all);
}

/// What is wrong with the arrays of a part, "" if nothing.
std::string fault(const HostArrays& arrays, int64_t items) {
  if (arrays.empty() || items == 0) return "holds no arrays";
  for (const auto& [name, a] : arrays)
    if (a.shape().rank() == 0 || a.dims()[0] != items)
      return fmt::format("'{}' is {}, expected {} items on axis 0", name, to_string(a.shape()), items);
  return "";
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

std::string metadata_of(const SafetensorsReader& reader, const char* name) {
  const auto it = reader.metadata().find(name);
  return it == reader.metadata().end() ? "" : it->second;
}

bool is_part(const std::string& file) { return file.starts_with("part-") && file.ends_with(".safetensors"); }

/// The parts in a folder of this machine, sorted.
std::vector<std::string> parts_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& f : fs::directory_iterator(folder))
    if (is_part(f.path().filename())) names.push_back(f.path().filename());
  std::ranges::sort(names);
  return names;
}

/// Writes a part; its name is a hash of its items. Returns the name.
std::string write_part(const std::string& folder, const std::vector<std::string>& items, const HostArrays& arrays) {
  const std::string text = fmt::format("{}", fmt::join(items, "\n"));
  const std::string name = "part-" + content_hash(text) + ".safetensors";
  write_safetensors(below(folder, name), arrays, {{kItems, text}, {kChecksum, checksum_of(arrays, text)}});
  return name;
}

}  // namespace

ArrayCache::ArrayCache(const std::string& folder, const std::string& kind, const std::string& key) {
  const std::string whole_key = kThisVersion + key + "\n";
  name_ = kind + "-" + content_hash(whole_key);
  const std::string location = below(folder, name_);
  path_ = local_cache_path(location);
  make_folders(path_);
  std::map<std::string, FoundFile> remote;  // in a bucket, by name
  if (is_remote(folder)) {
    place_ = location;
    for (FoundFile& f : list_all_files(place_))
      remote.emplace(fs::path(split_location(f.location).path).filename(), std::move(f));
    if (!remote.contains(kKeyFile)) put_text(below(place_, kKeyFile), whole_key);
  }
  if (const std::string file = below(path_, kKeyFile); !exists(file)) write_file_atomic(file, whole_key);
  std::set<std::string> names;
  for (const std::string& name : parts_in(path_)) names.insert(name);
  const std::set<std::string> here = names;
  for (const auto& [name, file] : remote)
    if (is_part(name)) names.insert(name);
  for (const std::string& name : names) parts_.push_back({.file = name, .items = {}, .arrays = {}});
  parallel_for(std::ssize(parts_), [&](int64_t i, int) {
    Stored& part = parts_[static_cast<size_t>(i)];
    const std::string name = part.file;
    if (!here.contains(name)) get_file(remote.at(name), below(path_, name));
    try {
      part = stored(name, false);
      part.arrays.clear();
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;
      part.damaged = true;
      log_warning("latent cache: {} is not used: {}", below(path_, name), e.message());
    }
    if (!part.damaged && !remote.contains(name)) upload(name);
  });
  index();
}

ArrayCache::Stored ArrayCache::stored(const std::string& file, bool whole) const {
  const SafetensorsReader reader = SafetensorsReader::open(below(path_, file));
  const std::string items = metadata_of(reader, kItems);
  Stored s{.file = file, .items = lines_of(items), .arrays = reader.tensors()};
  const std::string reason = fault(s.arrays, std::ssize(s.items));
  check(reason.empty(), Code::io, "{}", reason);
  check(!whole || checksum_of(s.arrays, items) == metadata_of(reader, kChecksum), Code::io,
        "its checksum differs from the one that was written");
  return s;
}

void ArrayCache::index() {
  places_.clear();
  for (size_t p = 0; p < parts_.size(); ++p)
    for (size_t row = 0; !parts_[p].damaged && row < parts_[p].items.size(); ++row)
      places_.try_emplace(parts_[p].items[row], Place{static_cast<int32_t>(p), static_cast<int32_t>(row)});
}

void ArrayCache::open(const std::vector<std::string>& items) {
  for (bool damage = true; damage;) {  // an item of a damaged part may be in another one
    damage = false;
    std::set<size_t> parts;
    for (const std::string& item : items)
      if (const auto found = places_.find(item); found != places_.end()) {
        const auto part = static_cast<size_t>(found->second.part);
        if (parts_[part].arrays.empty()) parts.insert(part);
      }
    const std::vector<size_t> order(parts.begin(), parts.end());
    std::mutex mutex;
    int64_t done = 0;
    auto last_logged = std::chrono::steady_clock::now();
    parallel_for(std::ssize(order), [&](int64_t i, int) {
      Stored& part = parts_[order[static_cast<size_t>(i)]];
      std::string reason;
      try {
        part = stored(part.file, true);
      } catch (const Error& e) {
        if (e.code() != Code::io) throw;
        reason = e.message();
      }
      const std::lock_guard lock(mutex);
      if (!reason.empty()) {
        log_warning("latent cache: {} is recomputed: {}", below(path_, part.file), reason);
        part.damaged = damage = true;
      }
      ++done;
      const auto now = std::chrono::steady_clock::now();
      if (now - last_logged < std::chrono::seconds(5)) return;
      last_logged = now;
      log_info("latent cache: compared {} of {} parts with their checksums", done, order.size());
    });
    if (damage) index();
  }
}

std::optional<ArrayCache::Place> ArrayCache::find(const std::string& item) const {
  const auto found = places_.find(item);
  if (found == places_.end() || parts_[static_cast<size_t>(found->second.part)].arrays.empty()) return std::nullopt;
  return found->second;
}

void ArrayCache::upload(const std::string& file) const {
  if (place_.empty()) return;
  try {
    put_file(below(path_, file), below(place_, file));
  } catch (const Error& e) {
    log_warning("latent cache: {} is not uploaded: {}", below(path_, file), e.what());
  }
}

void ArrayCache::put(const std::vector<std::string>& items, const HostArrays& arrays) {
  const std::string reason = fault(arrays, std::ssize(items));
  check(reason.empty(), Code::internal, "latent cache: a part of {} items: {}", items.size(), reason);
  const std::string name = write_part(path_, items, arrays);
  const auto part = static_cast<int32_t>(parts_.size());
  parts_.push_back(stored(name, false));
  for (size_t row = 0; row < items.size(); ++row) places_[items[row]] = {part, static_cast<int32_t>(row)};
  upload(name);
}

HostArrays ArrayCache::read(Place place) const {
  check(place.part >= 0 && place.part < std::ssize(parts_), Code::internal, "latent cache: there is no part {}",
        place.part);
  const Stored& s = parts_[static_cast<size_t>(place.part)];
  check(place.row >= 0 && place.row < std::ssize(s.items) && !s.arrays.empty(), Code::internal,
        "latent cache: there is no item {} of {}", place.row, s.file);
  HostArrays out;
  for (const auto& [name, a] : s.arrays) out.emplace(name, row_of(a, place.row));
  return out;
}

CachedItems unused_items(const std::string& folder, const std::unordered_set<std::string>& used, bool remove) {
  CachedItems out;
  const std::string here = remove ? local_copy(folder) : local_cache_path(folder);
  std::error_code ec;
  std::vector<std::string> caches;
  for (const auto& f : fs::directory_iterator(here, ec))
    if (const std::string key = f.path() / kKeyFile; exists(key) && read_file(key).starts_with(kAnyVersion))
      caches.push_back(f.path().filename());
  const auto remove_one = [&](const std::string& name) {
    remove_file(below(here, name));
    if (is_remote(folder)) remove_file(below(folder, name));
  };
  for (const std::string& cache : caches) {
    const std::string path = below(here, cache);
    for (const std::string& file : parts_in(path)) {
      std::vector<std::string> items;
      std::vector<int64_t> retained;
      HostArrays arrays;
      int64_t n = 0;  // items; of other versions and of damaged parts they are not known
      try {
        const SafetensorsReader reader = SafetensorsReader::open(below(path, file));
        items = lines_of(metadata_of(reader, kItems));
        arrays = reader.tensors();
        n = arrays.empty() || arrays.begin()->second.shape().rank() == 0 ? 0 : arrays.begin()->second.dims()[0];
        if (!fault(arrays, std::ssize(items)).empty()) items.clear();
      } catch (const Error& e) {
        if (e.code() != Code::io) throw;
      }
      for (size_t i = 0; i < items.size(); ++i)
        if (used.contains(cache + "/" + items[i])) retained.push_back(static_cast<int64_t>(i));
      const int64_t unused = n - std::ssize(retained),
                    bytes = static_cast<int64_t>(fs::file_size(below(path, file), ec));
      out.all += n;
      out.unused += unused;
      if (!retained.empty() && unused == 0) continue;
      out.unused_bytes += n == 0 ? bytes : static_cast<int64_t>(static_cast<double>(bytes) / n * unused);
      if (!remove) continue;
      if (!retained.empty()) {
        std::vector<std::string> names;
        HostArrays rest;
        for (const int64_t i : retained) names.push_back(items[static_cast<size_t>(i)]);
        for (const auto& [name, a] : arrays) rest[name] = select_parts(a, retained, n);
        const std::string part = write_part(path, names, rest);
        if (is_remote(folder)) put_file(below(path, part), below(below(folder, cache), part));
      }
      remove_one(below(cache, file));
    }
    if (!remove || !parts_in(path).empty()) continue;
    remove_one(below(cache, kKeyFile));
    fs::remove(path, ec);
  }
  return out;
}

}  // namespace md
