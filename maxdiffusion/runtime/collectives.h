// Collectives of one run of a program by kind and mesh axis: counts and bytes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/mesh/mesh.h"
#include "maxdiffusion/pjrt/collectives.h"

namespace md {

struct CollectiveSum {
  std::string kind;               // all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, …
  std::vector<std::string> axes;  // mesh axes over which it communicates, in mesh order
  bool between_slices = false;    // over DCN, not within a slice over ICI
  int64_t operations = 0;         // in the program
  double runs = 0, bytes = 0;     // per device and run, with trip counts of loops; bytes as Collective::bytes
  std::map<std::string, double> bytes_of;  // by the original operation, if the compiler kept its name
  bool at_least = false;                   // inside a loop of unknown trip count, counted as one
};

/// `operations` of a program whose partitions are the devices of `mesh` in its order; sorted by bytes, descending.
std::vector<CollectiveSum> sum_collectives(const std::vector<pjrt::Collective>& operations, const Mesh& mesh);

/// "all-gather over fsdp: 12 operations, 360 runs, 4608.00 MiB (ICI)"
std::string to_string(const CollectiveSum& sum);
/// The `count` names with most bytes: "blocks.*.ffn.net.0.proj/dot 1.20 MiB, …".
std::string largest(const CollectiveSum& sum, size_t count);

}  // namespace md
