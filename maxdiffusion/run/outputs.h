// The places that a run writes to.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "maxdiffusion/run/run_lock.h"
#include "maxdiffusion/settings/run_config.h"
#include "maxdiffusion/storage/claim.h"
#include "maxdiffusion/storage/mirror.h"

namespace md {

/// The config with folders of this machine in the place of output_dir, metrics_file and timing_metrics_file, where
/// these are in buckets. checkpoint_dir and the keys of caches stay: what reads them knows buckets.
RunConfig on_this_machine(const RunConfig& config);

/// A training run's folder: its locks, and where it is in a bucket, the folder of this machine that stands for it, with
/// a mirror that carries over what is written there. What a resumed run reads besides checkpoints (config.yml, metrics)
/// is fetched first.
class Outputs {
 public:
  /// Throws io where another run has the folder, or the bucket cannot be written to. `leads`: false for processes of a
  /// run that leave its folder to another of them.
  explicit Outputs(const RunConfig& given, bool leads = true);
  /// What the run goes by.
  const RunConfig& config() const { return config_; }
  /// See LoopOptions; empty where nothing is in a bucket.
  std::function<void()> flushed() const;
  std::function<void()> before_commit() const;
  /// Everything is there. Throws io.
  void finish();

 private:
  RunConfig config_;
  std::optional<RunLock> lock_;
  std::optional<Claim> claim_;
  std::unique_ptr<Mirror> mirror_;
};

}  // namespace md
