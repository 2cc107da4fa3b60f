// The rows of a batch that a process reads: those of its devices.
#pragma once

#include <cstdint>
#include <vector>

#include "maxdiffusion/mesh/shards.h"

namespace md {

/// One of several equal shares of every batch. Processes whose devices hold the same rows (they split only `tensor` or
/// `context`) have the same share.
struct BatchShare {
  int64_t process = 0, processes = 1;  // index and number of shares
  /// Indices, ascending, of this share among `processes · parts.size()` equal parts of the batch; empty: part `process`
  /// of `processes`.
  std::vector<int64_t> parts;

  /// Rows of a batch of all processes, ascending. Throws invalid_config if it is not divisible.
  std::vector<int64_t> rows(int64_t batch) const;
  /// These rows as shards of the global batch, without a copy.
  ShardedArray shards(const HostArray& rows) const;
  bool operator==(const BatchShare&) const = default;
};

/// The share of process `process` where device i, in mesh order, belongs to `processes[i]`, and axis 0 of the batch is
/// sharded as `batch` is. Throws invalid_config if the rows of two processes overlap only in part.
BatchShare batch_share(const Mesh& mesh, const Sharding& batch, const std::vector<int>& processes, int process);

}  // namespace md
