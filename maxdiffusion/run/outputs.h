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

/// A training run's folder and its locks. If it is in a bucket, files are written to a local folder and uploaded from
/// there; config.yml and metrics, which a resumed run reads in addition to checkpoints, are downloaded first.
class Outputs {
 public:
  /// Throws invalid_config if the run has no folder; io if another run holds its lock, or the bucket is not writable.
  /// Only the coordinating process locks the folder.
  explicit Outputs(const RunInfo& run);
  /// For LoopOptions; empty if nothing is in a bucket.
  std::function<void()> flushed() const;
  std::function<void()> before_commit() const;
  /// Throws io, naming the run's folder, if it was deleted or moved meanwhile.
  void check_folder() const;
  /// Waits until everything is uploaded. Throws io.
  void finish();

 private:
  std::optional<RunLock> lock_;
  std::optional<RunLock> checkpoints_lock_;  // of a folder for checkpoints outside of the run's
  std::optional<Lease> lease_;
  std::unique_ptr<RemoteSync> sync_;
};

/// Throws io, naming the key, if an output of a run is not writable. `cache_dir`: cache of encoded samples; may be
/// empty.
void check_outputs(const RunInfo& run, const std::string& cache_dir);

}  // namespace md
