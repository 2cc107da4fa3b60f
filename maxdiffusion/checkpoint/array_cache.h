// Arrays computed once for every sample of a dataset (latents, text embeddings) and cached on disk. The folder's name
// is a hash of what the values depend on: the dataset's fingerprint and the encoders. The cache is written in parts.
// Each part is a safetensors file that appears complete or not at all, so an interrupted run continues at the first
// missing part. Only the part being written is held in memory: samples are read through memory maps.
//
//   ArrayCache cache(folder, key, n, 256);
//   while (auto part = cache.next_missing()) cache.put(*part, encode(part->begin, part->end));
//   HostArrays one = cache.read(7);
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Thread safe for reading.
class ArrayCache {
 public:
  /// Samples [begin, end) of the dataset.
  struct Part {
    int64_t index = 0, begin = 0, end = 0;
  };

  /// Opens or creates `folder`/HASH (of key and sizes). `key`: text that changes whenever the values would; it is
  /// written to key.txt for people. Reads every part once, on all cores, and compares it with its checksum; a damaged
  /// part gets a warning and counts as missing. A folder in a bucket has a copy on this machine
  /// (storage/local_cache.h); parts are downloaded to it, and uploaded from it.
  ArrayCache(const std::string& folder, const std::string& key, int64_t samples, int64_t part_size = 256);

  bool complete() const { return !next_missing(); }
  std::optional<Part> next_missing() const;
  std::vector<Part> missing() const;
  /// The files' folder on this machine.
  const std::string& path() const { return path_; }
  int64_t parts() const { return static_cast<int64_t>(parts_.size()); }
  int64_t parts_present() const;
  /// Samples of the parts present, including those without arrays.
  int64_t samples_present() const;
  /// Stores the arrays of one part; axis 0 = its samples without those that are left out. `left_out`: one text per
  /// omitted sample, the only thing stored of it. Throws io (disk full: the part stays missing), and internal for wrong
  /// sizes or if names, types or row shapes differ from other parts.
  void put(const Part& part, const HostArrays& arrays, const std::vector<std::string>& left_out = {});

  /// Number of samples that have arrays. The cache must be complete.
  int64_t size() const;
  /// The arrays of sample number `sample` among those that have arrays, without axis 0. Borrowed from the memory map.
  HostArrays read(int64_t sample) const;
  /// Calls `take` with the array `name` of each part, in order.
  void each_part(const std::string& name, const std::function<void(const HostArray&)>& take) const;
  /// The texts of the omitted samples of all parts, in order.
  std::vector<std::string> left_out() const;

 private:
  struct Stored {
    bool present = false;
    HostArrays arrays;  // mapped; empty: all samples are left out
    std::vector<std::string> left_out;
    int64_t rows = 0;
  };
  Part part(int64_t index) const;
  std::string file_of(const Part& part) const;
  /// Maps a part. Throws io naming the damage. `whole`: also compares its checksum.
  Stored open(const Part& part, bool whole) const;
  void take(int64_t index, Stored stored);
  /// Uploads a part to the bucket; logs a warning on failure.
  void upload(const Part& part) const;

  std::string path_, place_;  // place_: in a bucket, or ""
  int64_t samples_, part_size_;
  std::vector<Stored> parts_;
  std::vector<int64_t> first_;  // number, among samples that have arrays, of each part's first one
};

}  // namespace md
