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

/// A part of an array; its values have the sizes of `slice`. With `make` they are made each time that they are read,
/// and `values` is empty.
struct Shard {
  Slice slice;
  HostArray values;
  std::function<HostArray()> make = {};

  HostArray get() const { return make ? make() : values; }
};

/// An array, and those shards of it that are here; they do not overlap. Copies share the bytes.
struct ShardedArray {
  Shape shape;  // of the array
  std::vector<Shard> shards;

  ShardedArray() = default;
  ShardedArray(Shape shape, std::vector<Shard> shards) : shape(std::move(shape)), shards(std::move(shards)) {}
  /// One shard that is all of the array.
  ShardedArray(HostArray whole);  // NOLINT: an array is the simple case of its shards

  /// Whether all of the array is here.
  bool complete() const;
  /// Any part of what is here, across shards: borrowed where it lies in one shard without gaps, else copied. Throws
  /// internal where an element is not here.
  HostArray read(const Slice& slice) const;
  HostArray whole() const { return read(Slice::all(shape.dims)); }
  /// As read(); a shard that is just this slice is no longer here then.
  HostArray take(const Slice& slice);
  /// The same shards in another type; those of this type share their bytes, those that are made are cast when they are.
  ShardedArray cast(DType to) const;
  /// The same shards, of zeros that are made when they are read.
  ShardedArray zeros() const;
};

using NamedShards = std::map<std::string, ShardedArray>;
/// Between arrays that are whole and their shards.
NamedShards as_shards(HostArrays arrays);
HostArrays as_arrays(const NamedShards& shards);

/// What two slices have in common; nothing where they do not meet.
std::optional<Slice> overlap(const Slice& a, const Slice& b);
/// The elements of `part` as they lie in the memory of `holder`, a slice that it is within: calls run(first, elements),
/// numbers among the holder's elements, for each stretch of neighbours, in order.
void each_run(const Slice& part, const Slice& holder, const std::function<void(int64_t first, int64_t count)>& run);

/// Empty where the slices make up an array of these sizes without hole or overlap; else what is wrong.
std::string tiling_fault(const Dims& dims, const std::vector<Slice>& slices);

}  // namespace md
