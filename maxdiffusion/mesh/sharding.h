// Sharding: which mesh axes split each dim of an array, and which piece each device then holds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/mesh/mesh.h"

namespace md {

/// Mesh axes per dim, major first. Shorter than the rank: the remaining dims are whole.
struct Sharding {
  std::vector<std::vector<std::string>> dims;
  bool operator==(const Sharding&) const = default;
  bool replicated() const;
};

/// A hyper-rectangle of an array.
struct Slice {
  std::vector<int64_t> start, size;
  bool operator==(const Slice&) const = default;
};

/// Piece held by the device at `device` in mesh order. Throws invalid_config naming `name` when a dim does not divide.
Slice shard_of(const Mesh& mesh, const Sharding& sharding, const std::vector<int64_t>& dims, int64_t device,
               const std::string& name = "array");

}  // namespace md
