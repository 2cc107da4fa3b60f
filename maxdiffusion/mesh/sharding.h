// Sharding: which mesh axes split each dim of an array, which shard each device then holds, and how it lies there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/mesh/mesh.h"

namespace md {

struct Sharding {
  /// Mesh axes per dim, major first. Shorter than the rank: the remaining dims are whole.
  std::vector<std::vector<std::string>> dims;
  /// The dims as they follow each other in the memory of a device, outermost first. Empty: as they are numbered.
  std::vector<int64_t> order = {};
  bool operator==(const Sharding&) const = default;
  bool replicated() const;
};

/// A hyper-rectangle of an array.
struct Slice {
  std::vector<int64_t> start, size;
  /// All of an array of these sizes.
  static Slice all(const std::vector<int64_t>& dims) { return {std::vector<int64_t>(dims.size(), 0), dims}; }
  int64_t elements() const;
  /// Whether it is a part of an array of these sizes.
  bool within(const std::vector<int64_t>& dims) const;
  bool operator==(const Slice&) const = default;
};
/// "[0:2,16:32]": from the first element to the one behind the last, per dim.
std::string to_string(const Slice& s);

/// Shard held by the device at `device` in mesh order. Throws invalid_config naming `name` when a dim does not divide.
Slice shard_of(const Mesh& mesh, const Sharding& sharding, const std::vector<int64_t>& dims, int64_t device,
               const std::string& name = "array");

/// Whether the device at `device` in mesh order is the first of those that hold the same shard. Each shard of an array
/// has one such device: the process of that device is the one that saves it.
bool is_first_holder(const Mesh& mesh, const Sharding& sharding, int64_t device);

}  // namespace md
