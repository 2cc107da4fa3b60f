// Arrays computed once for every sample of a dataset (latents, text embeddings) and kept on disk. The folder's name is
// a hash of what the values depend on: the dataset's fingerprint and the encoders. It is filled in parts, each a
// safetensors file that appears whole or not at all, so an interrupted run continues at the first missing part.
//
//   ArrayCache cache(folder, key, n, 256);
//   while (auto part = cache.next_missing()) cache.put(*part, encode(part->begin, part->end));
//   auto arrays = cache.read_all();
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

class ArrayCache {
 public:
  /// Samples [begin, end) of the dataset.
  struct Part {
    int64_t index = 0, begin = 0, end = 0;
  };

  /// Opens or makes `folder`/<hash of key and sizes>. `key`: text that changes whenever the values would; it is written
  /// to key.txt for people. Parts that cannot be read are named in a warning and count as missing.
  ArrayCache(const std::string& folder, const std::string& key, int64_t samples, int64_t part_size = 256);

  bool complete() const { return !next_missing(); }
  std::optional<Part> next_missing() const;
  /// The files' folder.
  const std::string& path() const { return path_; }
  int64_t parts() const { return static_cast<int64_t>(present_.size()); }
  int64_t parts_present() const;
  /// Stores the arrays of one part, axis 0 = its samples. Throws io (disk full: the part stays missing), internal for
  /// wrong sizes.
  void put(const Part& part, const HostArrays& arrays);
  /// All parts joined along axis 0. Throws io when parts are missing or disagree in names, types or sizes.
  HostArrays read_all() const;

 private:
  Part part(int64_t index) const;
  std::string file_of(const Part& part) const;

  std::string path_;
  int64_t samples_, part_size_;
  std::vector<bool> present_;
};

}  // namespace md
