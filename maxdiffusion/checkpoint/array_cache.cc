#include "maxdiffusion/checkpoint/array_cache.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRange = "samples";  // metadata of a part
std::string range_of(int64_t begin, int64_t end) { return fmt::format("[{}, {})", begin, end); }

// What is wrong with the arrays of a part, "" if nothing.
std::string fault(const HostArrays& arrays, int64_t samples) {
  if (arrays.empty()) return "holds no arrays";
  for (const auto& [name, a] : arrays) {
    if (a.shape().rank() == 0 || a.dims()[0] != samples) {
      return fmt::format("'{}' is {}, expected {} samples on axis 0", name, to_string(a.shape()), samples);
    }
  }
  return "";
}

}  // namespace

ArrayCache::ArrayCache(const std::string& folder, const std::string& key, int64_t samples, int64_t part_size)
    : samples_(samples), part_size_(part_size) {
  check(samples > 0 && part_size > 0, Code::internal, "latent cache: {} samples in parts of {}: both must be > 0",
        samples, part_size);
  const std::string whole_key = fmt::format("latent cache 1: {} samples in parts of {}\n{}\n", samples, part_size, key);
  path_ = (fs::path(folder) / content_hash(whole_key)).string();
  make_folders(path_);
  if (const std::string file = (fs::path(path_) / "key.txt").string(); !exists(file))
    write_file_atomic(file, whole_key);
  present_.resize(static_cast<size_t>((samples + part_size - 1) / part_size));
  for (size_t i = 0; i < present_.size(); ++i) {
    const Part p = part(static_cast<int64_t>(i));
    if (!exists(file_of(p))) continue;
    std::string reason;
    try {
      const SafetensorsReader reader = SafetensorsReader::open(file_of(p));
      const auto range = reader.metadata().find(kRange);
      reason = range != reader.metadata().end() && range->second == range_of(p.begin, p.end)
                   ? fault(reader.tensors(), p.end - p.begin)
                   : "it holds other samples";
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;
      reason = e.message();
    }
    present_[i] = reason.empty();
    if (!reason.empty()) log_warning("latent cache: {} is made again: {}", file_of(p), reason);
  }
}

ArrayCache::Part ArrayCache::part(int64_t index) const {
  return {index, index * part_size_, std::min(samples_, (index + 1) * part_size_)};
}

std::string ArrayCache::file_of(const Part& part) const {
  return (fs::path(path_) / fmt::format("part-{:05}-of-{:05}.safetensors", part.index + 1, present_.size())).string();
}

std::optional<ArrayCache::Part> ArrayCache::next_missing() const {
  const auto it = std::ranges::find(present_, false);
  if (it == present_.end()) return std::nullopt;
  return part(it - present_.begin());
}

int64_t ArrayCache::parts_present() const { return std::ranges::count(present_, true); }

void ArrayCache::put(const Part& p, const HostArrays& arrays) {
  check(p.index >= 0 && p.index < parts() && p.begin == part(p.index).begin && p.end == part(p.index).end,
        Code::internal, "latent cache: part {} [{}, {}) is none of the {} parts", p.index, p.begin, p.end, parts());
  const std::string reason = fault(arrays, p.end - p.begin);
  check(reason.empty(), Code::internal, "latent cache: part {}: {}", p.index, reason);
  write_safetensors(file_of(p), arrays, {{kRange, range_of(p.begin, p.end)}});
  present_[static_cast<size_t>(p.index)] = true;
}

HostArrays ArrayCache::read_all() const {
  if (const auto missing = next_missing()) {
    fail(Code::io, "latent cache '{}': {} of {} parts are missing, the first is {}", path_, parts() - parts_present(),
         parts(), file_of(*missing));
  }
  HostArrays all;
  for (int64_t i = 0; i < parts(); ++i) {
    const Part p = part(i);
    const SafetensorsReader reader = SafetensorsReader::open(file_of(p));
    if (i == 0) {
      for (const auto& [name, a] : reader.tensors()) {
        Dims dims = a.dims();
        dims[0] = samples_;
        all.emplace(name, HostArray(Shape{a.dtype(), dims}));
      }
    }
    check(reader.tensors().size() == all.size(), Code::io, "{}: {} arrays; the first part has {}", file_of(p),
          reader.tensors().size(), all.size());
    for (const auto& [name, a] : reader.tensors()) {
      const auto it = all.find(name);
      check(it != all.end(), Code::io, "{}: array '{}' is not in the first part", file_of(p), name);
      Shape expected = it->second.shape();
      expected.dims[0] = p.end - p.begin;
      check(a.shape() == expected, Code::io, "{}: array '{}' is {}; expected {}", file_of(p), name,
            to_string(a.shape()), to_string(expected));
      const size_t row = it->second.bytes() / static_cast<size_t>(samples_);
      std::memcpy(it->second.mutable_data() + static_cast<size_t>(p.begin) * row, a.data(), a.bytes());
    }
  }
  return all;
}

}  // namespace md
