// Arrays computed once for every item (latents of an image, embeddings of a caption) and cached on disk. An item's name
// is a hash of what it is computed from, so that an item of another dataset, or one that comes back, is found. A cache
// is a folder whose name is a hash of what all its values depend on: the encoders. It has parts of several items. Each
// part is a safetensors file that appears complete or not at all, so an interrupted run continues with the items that
// are missing, and several processes may write at the same time. Only the part being written is held in memory: arrays
// are read through memory maps.
//
//   ArrayCache cache(folder, "images", key);
//   cache.open(items);
//   cache.put(missing, encode(missing));
//   HostArrays one = cache.read(*cache.find(items[7]));
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Thread safe for reading.
class ArrayCache {
 public:
  /// Where an item's arrays are.
  struct Place {
    int32_t part = -1, row = -1;
  };

  /// Opens or creates `folder`/`kind`-HASH. `key`: text that changes whenever the values would; its hash is in the
  /// folder's name, and it is written to key.txt for people. Reads which items the parts hold. A folder in a bucket has
  /// a copy on this machine (storage/local_cache.h); parts are downloaded to it, and uploaded from it.
  ArrayCache(const std::string& folder, const std::string& kind, const std::string& key);

  /// The name of its folder.
  const std::string& name() const { return name_; }
  /// The files' folder on this machine.
  const std::string& path() const { return path_; }
  /// Makes the items that are present readable. Reads their parts once, on all cores, and compares them with their
  /// checksums; a damaged part gets a warning, and its items count as missing.
  void open(const std::vector<std::string>& items);
  /// Of an opened or stored item; none: it is missing.
  std::optional<Place> find(const std::string& item) const;
  /// Stores the arrays of items as one part; axis 0 = the items. Throws io (disk full: the items stay missing), and
  /// internal for wrong sizes.
  void put(const std::vector<std::string>& items, const HostArrays& arrays);
  /// The arrays of an item, without axis 0. Borrowed from the memory map.
  HostArrays read(Place place) const;

 private:
  struct Stored {
    std::string file;  // its name
    std::vector<std::string> items;
    HostArrays arrays;  // mapped; empty until it is opened
    bool damaged = false;
  };
  Stored stored(const std::string& file, bool whole) const;
  void index();
  /// Uploads a part to the bucket; logs a warning on failure.
  void upload(const std::string& file) const;

  std::string name_, path_, place_;  // place_: in a bucket, or ""
  std::vector<Stored> parts_;
  std::unordered_map<std::string, Place> places_;  // of all items, in opened parts or not
};

/// Items in the caches of a folder, and those among them that nothing uses.
struct CachedItems {
  int64_t all = 0, unused = 0;
  int64_t unused_bytes = 0;
};
/// Counts the items of all caches in `folder`, of every version; for a folder in a bucket, of their copies on this
/// machine. `used`: "NAME/ITEM", with ArrayCache::name. `remove`: removes the unused ones; a part that also has used
/// ones is rewritten without them. Throws io.
CachedItems unused_items(const std::string& folder, const std::unordered_set<std::string>& used, bool remove = false);

}  // namespace md
