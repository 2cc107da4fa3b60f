// Shards: parts of arrays in host memory, as the processes of a run hold, save and read them. No process needs a whole
// array. Pure data.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/mesh/sharding.h"

namespace md {

/// A region of an array; `values` has the sizes of `slice`. With `make`, `values` is empty and make() computes them at
/// each read.
struct Shard {
  Slice slice;
  HostArray values;
  std::function<HostArray()> make = {};

  HostArray get() const { return make ? make() : values; }
};

/// An array of which this process holds some shards; they do not overlap. Copies share the bytes.
struct ShardedArray {
  Shape shape;  // of the whole array
  std::vector<Shard> shards;

  ShardedArray() = default;
  ShardedArray(Shape shape, std::vector<Shard> shards) : shape(std::move(shape)), shards(std::move(shards)) {}
  /// One shard: the whole array.
  ShardedArray(HostArray whole);  // NOLINT: implicit

  /// Whether the shards cover the whole array.
  bool complete() const;
  /// Any region of the held shards. Borrows the bytes if the region is contiguous in one shard, else copies. Throws
  /// internal if an element is not held.
  HostArray read(const Slice& slice) const;
  HostArray whole() const { return read(Slice::all(shape.dims)); }
  /// As read(), and removes the shard if it is exactly this slice.
  HostArray take(const Slice& slice);
  /// The shards in another type. Shards of that type share their bytes; computed ones are cast when read.
  ShardedArray cast(DType to) const;
  /// The same shards with zeros, which are allocated when read.
  ShardedArray zeros() const;
};

using NamedShards = std::map<std::string, ShardedArray>;
/// Converts whole arrays to shards, and back.
NamedShards as_shards(HostArrays arrays);
HostArrays as_arrays(const NamedShards& shards);

/// The intersection of two slices; none if it is empty.
std::optional<Slice> overlap(const Slice& a, const Slice& b);
/// Calls run(first, count) for each contiguous range of `part` in the row-major memory of `holder`, which contains it;
/// `first` counts the holder's elements.
void each_run(const Slice& part, const Slice& holder, const std::function<void(int64_t first, int64_t count)>& run);

/// Empty if the slices cover an array of these sizes without gap or overlap; else what is wrong.
std::string tiling_fault(const Dims& dims, const std::vector<Slice>& slices);

}  // namespace md
