// Which rows of a batch a process reads: those that its devices hold.
#pragma once

#include <cstdint>
#include <vector>

#include "maxdiffusion/mesh/shards.h"

namespace md {

/// One of several equal shares of every batch. Processes whose devices hold the same rows (they split only `tensor` or
/// `context`) have the same share.
struct BatchShare {
  int64_t process = 0, processes = 1;  // the number of this share, and how many there are
  /// Which of `processes · parts.size()` equal parts of the batch, ascending; empty: the one part `process` of
  /// `processes`.
  std::vector<int64_t> parts;

  /// Rows of a batch of all processes, ascending. Throws invalid_config where it does not divide.
  std::vector<int64_t> rows(int64_t batch) const;
  /// An array of these rows as shards of the batch of all processes; nothing is copied.
  ShardedArray shards(const HostArray& rows) const;
  bool operator==(const BatchShare&) const = default;
};

/// The share of process `process` where device i, in mesh order, belongs to `processes[i]`, and axis 0 of the batch
/// lies on the mesh as that of `batch`. Throws invalid_config where the rows of two processes agree in part.
BatchShare batch_share(const Mesh& mesh, const Sharding& batch, const std::vector<int>& processes, int process);

}  // namespace md
