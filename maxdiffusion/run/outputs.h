// The locations that a run writes to.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "maxdiffusion/run/run_lock.h"
#include "maxdiffusion/settings/run_info.h"
#include "maxdiffusion/storage/lease.h"
#include "maxdiffusion/storage/remote_sync.h"

namespace md {

/// A training run's folder: its locks, and where it is in a bucket, a local folder, from which
/// what is written there is uploaded. What a resumed run reads besides checkpoints (config.yml, metrics)
/// is fetched first.
class Outputs {
 public:
  /// Throws invalid_config where the run has no folder; io where another run has it, or the bucket cannot be written
  /// to. Processes that do not coordinate the run leave its folder to the one that does.
  explicit Outputs(const RunInfo& run);
  /// See LoopOptions; empty where nothing is in a bucket.
  std::function<void()> flushed() const;
  std::function<void()> before_commit() const;
  /// Everything is there. Throws io.
  void finish();

 private:
  std::optional<RunLock> lock_;
  std::optional<Lease> lease_;
  std::unique_ptr<RemoteSync> sync_;
};

/// Throws io, naming the key, where an output of a run cannot be written. `cache_dir`: of what is encoded once; may be
/// empty.
void check_outputs(const RunInfo& run, const std::string& cache_dir);

}  // namespace md
