#include "maxdiffusion/checkpoint/array_cache.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>

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
constexpr const char *kRange = "samples", *kLeftOut = "left_out", *kChecksum = "checksum";
std::string range_of(int64_t begin, int64_t end) { return fmt::format("[{}, {})", begin, end); }

std::string checksum_of(const HostArrays& arrays, const std::string& left_out) {
  std::string all = left_out;
  for (const auto& [name, a] : arrays)
    all += fmt::format("\n{} {} {}", name, to_string(a.shape()),
                       content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()}));
  return content_hash(all);
}

/// What is wrong with the arrays of a part, "" if nothing.
std::string fault(const HostArrays& arrays, int64_t samples) {
  if (arrays.empty() && samples > 0) return "holds no arrays";
  for (const auto& [name, a] : arrays) {
    if (a.shape().rank() == 0 || a.dims()[0] != samples) {
      return fmt::format("'{}' is {}, expected {} samples on axis 0", name, to_string(a.shape()), samples);
    }
  }
  return "";
}

/// How the samples of one part differ from those of another, "" if they have the same form.
std::string difference(const HostArrays& arrays, const HostArrays& others) {
  for (const auto& [name, a] : others) {
    const auto it = arrays.find(name);
    if (it == arrays.end()) return fmt::format("it has no '{}', as other parts have", name);
    if (row_of(it->second, 0).shape() != row_of(a, 0).shape())
      return fmt::format("'{}' is {}, in another part {}", name, to_string(it->second.shape()), to_string(a.shape()));
  }
  return arrays.size() == others.size() ? "" : "it has arrays that other parts do not have";
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

}  // namespace

ArrayCache::ArrayCache(const std::string& folder, const std::string& key, int64_t samples, int64_t part_size)
    : samples_(samples), part_size_(part_size) {
  check(samples > 0 && part_size > 0, Code::internal, "latent cache: {} samples in parts of {}: both must be > 0",
        samples, part_size);
  const std::string whole_key = fmt::format("latent cache 2: {} samples in parts of {}\n{}\n", samples, part_size, key);
  const std::string location = below(folder, content_hash(whole_key));
  path_ = local_cache_path(location);
  make_folders(path_);
  std::map<std::string, FoundFile> remote;  // in a bucket, by name
  if (is_remote(folder)) {
    place_ = location;
    for (FoundFile& f : list_all_files(place_))
      remote.emplace(fs::path(split_location(f.location).path).filename(), std::move(f));
    if (!remote.contains("key.txt")) put_text(below(place_, "key.txt"), whole_key);
  }
  if (const std::string file = (fs::path(path_) / "key.txt").string(); !exists(file))
    write_file_atomic(file, whole_key);
  parts_.resize(static_cast<size_t>((samples + part_size - 1) / part_size));
  std::mutex mutex;
  int64_t done = 0;
  auto last_logged = std::chrono::steady_clock::now();
  parallel_for(parts(), [&](int64_t i, int) {
    const Part p = part(i);
    const auto found = remote.find(fs::path(file_of(p)).filename());
    const bool is_local = exists(file_of(p));
    if (!is_local && found == remote.end()) return;
    if (!is_local) get_file(found->second, file_of(p));
    Stored stored;
    std::string reason;
    try {
      stored = open(p, true);
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;
      reason = e.message();
    }
    const std::lock_guard lock(mutex);
    if (reason.empty()) try {
        take(i, std::move(stored));
      } catch (const Error& e) {
        reason = e.message();
      }
    if (!reason.empty()) log_warning("latent cache: {} is recomputed: {}", file_of(p), reason);
    if (reason.empty() && found == remote.end()) upload(p);
    ++done;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_logged < std::chrono::seconds(5)) return;
    last_logged = now;
    log_info("latent cache: compared {} of {} parts with their checksums", done, parts());
  });
}

ArrayCache::Part ArrayCache::part(int64_t index) const {
  return {index, index * part_size_, std::min(samples_, (index + 1) * part_size_)};
}

std::string ArrayCache::file_of(const Part& part) const {
  return (fs::path(path_) / fmt::format("part-{:05}-of-{:05}.safetensors", part.index + 1, parts_.size())).string();
}

ArrayCache::Stored ArrayCache::open(const Part& p, bool whole) const {
  const SafetensorsReader reader = SafetensorsReader::open(file_of(p));
  const auto meta = [&](const char* name) {
    const auto it = reader.metadata().find(name);
    return it == reader.metadata().end() ? "" : it->second;
  };
  check(meta(kRange) == range_of(p.begin, p.end), Code::io, "it holds other samples");
  Stored s{true, reader.tensors(), lines_of(meta(kLeftOut))};
  s.rows = p.end - p.begin - std::ssize(s.left_out);
  const std::string reason = fault(s.arrays, s.rows);
  check(reason.empty(), Code::io, "{}", reason);
  check(!whole || checksum_of(s.arrays, meta(kLeftOut)) == meta(kChecksum), Code::io,
        "its checksum differs from the one that was written");
  return s;
}

void ArrayCache::take(int64_t index, Stored stored) {
  const auto other = std::ranges::find_if(parts_, [](const Stored& s) { return !s.arrays.empty(); });
  if (other != parts_.end() && !stored.arrays.empty()) {
    const std::string reason = difference(stored.arrays, other->arrays);
    check(reason.empty(), Code::internal, "latent cache: part {}: {}", index, reason);
  }
  parts_[static_cast<size_t>(index)] = std::move(stored);
  first_.clear();
  for (int64_t n = 0; const Stored& s : parts_) first_.push_back(std::exchange(n, n + s.rows));
}

void ArrayCache::upload(const Part& p) const {
  if (place_.empty()) return;
  try {
    put_file(file_of(p), below(place_, fs::path(file_of(p)).filename()));
  } catch (const Error& e) {
    log_warning("latent cache: {} is not uploaded: {}", file_of(p), e.what());
  }
}

std::optional<ArrayCache::Part> ArrayCache::next_missing() const {
  const auto it = std::ranges::find(parts_, false, &Stored::present);
  if (it == parts_.end()) return std::nullopt;
  return part(it - parts_.begin());
}

std::vector<ArrayCache::Part> ArrayCache::missing() const {
  std::vector<Part> all;
  for (int64_t i = 0; i < parts(); ++i)
    if (!parts_[static_cast<size_t>(i)].present) all.push_back(part(i));
  return all;
}

int64_t ArrayCache::parts_present() const { return std::ranges::count(parts_, true, &Stored::present); }

int64_t ArrayCache::samples_present() const {
  int64_t n = 0;
  for (int64_t i = 0; i < parts(); ++i)
    if (parts_[static_cast<size_t>(i)].present) n += part(i).end - part(i).begin;
  return n;
}

void ArrayCache::put(const Part& p, const HostArrays& arrays, const std::vector<std::string>& left_out) {
  check(p.index >= 0 && p.index < parts() && p.begin == part(p.index).begin && p.end == part(p.index).end,
        Code::internal, "latent cache: part {} [{}, {}) is not one of the {} parts", p.index, p.begin, p.end, parts());
  const std::string reason = fault(arrays, p.end - p.begin - std::ssize(left_out));
  check(reason.empty(), Code::internal, "latent cache: part {}: {}", p.index, reason);
  std::vector<std::string> lines = left_out;
  for (std::string& line : lines) std::ranges::replace(line, '\n', ' ');
  const std::string words = fmt::format("{}", fmt::join(lines, "\n"));
  write_safetensors(file_of(p), arrays,
                    {{kRange, range_of(p.begin, p.end)}, {kLeftOut, words}, {kChecksum, checksum_of(arrays, words)}});
  take(p.index, open(p, false));
  upload(p);
}

int64_t ArrayCache::size() const {
  if (const auto missing = next_missing()) {
    fail(Code::io, "latent cache '{}': {} of {} parts are missing, the first is {}", path_, parts() - parts_present(),
         parts(), file_of(*missing));
  }
  return first_.back() + parts_.back().rows;
}

HostArrays ArrayCache::read(int64_t sample) const {
  const auto at = std::ranges::upper_bound(first_, sample) - first_.begin() - 1;
  const Stored& s = parts_[static_cast<size_t>(at)];
  const int64_t row = sample - first_[static_cast<size_t>(at)];
  check(sample >= 0 && row < s.rows, Code::internal, "latent cache: there is no sample {}", sample);
  HostArrays out;
  for (const auto& [name, a] : s.arrays) out.emplace(name, row_of(a, row));
  return out;
}

void ArrayCache::each_part(const std::string& name, const std::function<void(const HostArray&)>& take) const {
  for (const Stored& s : parts_)
    if (s.rows > 0) take(s.arrays.at(name));
}

std::vector<std::string> ArrayCache::left_out() const {
  std::vector<std::string> all;
  for (const Stored& s : parts_) all.insert(all.end(), s.left_out.begin(), s.left_out.end());
  return all;
}

}  // namespace md
