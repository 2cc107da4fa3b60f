// Arrays computed once for every sample of a dataset (latents, text embeddings) and kept on disk. The folder's name is
// a hash of what the values depend on: the dataset's fingerprint and the encoders. It is filled in parts, each a
// safetensors file that appears whole or not at all, so an interrupted run continues at the first missing part. Nothing
// is held in memory but the part that is being written: samples are read through memory maps.
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

  /// Opens or makes `folder`/HASH (of key and sizes). `key`: text that changes whenever the values would; it is written
  /// to key.txt for people. Every part is read once, on all cores, and compared with its checksum; one that is damaged
  /// is named in a warning and counts as missing. A folder in a bucket has a copy on this machine
  /// (storage/local_cache.h), to which parts are fetched, and from which they are put.
  ArrayCache(const std::string& folder, const std::string& key, int64_t samples, int64_t part_size = 256);

  bool complete() const { return !next_missing(); }
  std::optional<Part> next_missing() const;
  std::vector<Part> missing() const;
  /// The files' folder on this machine.
  const std::string& path() const { return path_; }
  int64_t parts() const { return static_cast<int64_t>(parts_.size()); }
  int64_t parts_present() const;
  /// Samples of the parts that are there, those without arrays included.
  int64_t samples_present() const;
  /// Stores the arrays of one part, axis 0 = its samples less those `left_out`, of which only these words are kept.
  /// Throws io (disk full: the part stays missing), internal for wrong sizes or arrays unlike those of other parts.
  void put(const Part& part, const HostArrays& arrays, const std::vector<std::string>& left_out = {});

  /// Of a complete cache, the samples that have arrays.
  int64_t size() const;
  /// The arrays of one of them, by its number among them, without axis 0, borrowed from the memory map.
  HostArrays read(int64_t sample) const;
  /// Calls `take` for one array of each part, in order.
  void each_part(const std::string& name, const std::function<void(const HostArray&)>& take) const;
  /// Of all parts, in order.
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
  /// Maps a part; throws io saying what is wrong with it. `whole`: also compares its checksum.
  Stored open(const Part& part, bool whole) const;
  void take(int64_t index, Stored stored);
  /// Puts a part into the bucket; what fails is a warning.
  void upload(const Part& part) const;

  std::string path_, place_;  // place_: in a bucket, or ""
  int64_t samples_, part_size_;
  std::vector<Stored> parts_;
  std::vector<int64_t> first_;  // of each part, its first sample's number among those that have arrays
};

}  // namespace md
