// Sharding: the mesh axes of each dim of an array, the shard of each device, and its memory layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/mesh/mesh.h"

namespace md {

struct Sharding {
  /// Mesh axes per dim, major first. Shorter than the rank: the remaining dims are replicated.
  std::vector<std::vector<std::string>> dims;
  /// Memory layout: the dims, outermost first. Empty: row-major.
  std::vector<int64_t> order = {};
  bool in_host_memory = false;  // in a device's part of the host's memory
  bool operator==(const Sharding&) const = default;
  bool replicated() const;
};

/// A rectangular region of an array.
struct Slice {
  std::vector<int64_t> start, size;
  /// The whole array of these sizes.
  static Slice all(const std::vector<int64_t>& dims) { return {std::vector<int64_t>(dims.size(), 0), dims}; }
  int64_t elements() const;
  /// Whether it is inside an array of these sizes.
  bool within(const std::vector<int64_t>& dims) const;
  bool operator==(const Slice&) const = default;
};
/// "[0:2,16:32]": start:end of each dim.
std::string to_string(const Slice& s);

/// Shard held by the device at `device` in mesh order. Throws invalid_config naming `name` when a dim does not divide.
Slice shard_of(const Mesh& mesh, const Sharding& sharding, const std::vector<int64_t>& dims, int64_t device,
               const std::string& name = "array");

/// Whether the device at `device` in mesh order is the first one with its shard. The process of that device saves the
/// shard.
bool is_first_holder(const Mesh& mesh, const Sharding& sharding, int64_t device);

}  // namespace md
