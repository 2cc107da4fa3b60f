// The loop: one dataset, one state, from the newest checkpoint to the last step. Nothing in it waits for the device
// (a step on the host itself waits for the one before: pjrt/executable.h): the state is donated from step to step,
// batches are prefetched, metrics are read one step late. What a run does between steps (evaluation, samples) is a
// hook: a rule for when it is due, and a function.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/metrics/profile.h"
#include "maxdiffusion/metrics/recorder.h"
#include "maxdiffusion/storage/location.h"
#include "maxdiffusion/train/state.h"

namespace md {

/// Keys of the loop.
struct LoopKeys {
  int64_t checkpoint_every = -1, checkpoints_to_keep = 3, prefetch_depth = 2, num_train_epochs = 1;
  bool save_final_checkpoint = true, save_optimizer = true, log_sharding = false, reuse_example_batch = false;
  bool enable_single_replica_ckpt_restoring = false;
  std::string checkpoint_dir;
  template <class V>
  void visit(V&& v) {
    v("checkpoint_every", checkpoint_every, "samples between checkpoints; -1: none before the end");
    v("checkpoints_to_keep", checkpoints_to_keep, "older ones are removed; 0 keeps all", at_least(0));
    v("checkpoint_dir", checkpoint_dir,
      "folder of checkpoints, local or gs://, s3://; empty: output_dir/run_name/checkpoints", KeyPath::output);
    v("save_final_checkpoint", save_final_checkpoint,
      "write a checkpoint after the last step, also with checkpoint_every=-1");
    v("save_optimizer", save_optimizer, "false: checkpoints have no moments; they start from zero on resuming");
    v("enable_single_replica_ckpt_restoring", enable_single_replica_ckpt_restoring,
      "of several processes with the same state one reads the checkpoint and sends it to the others");
    v("prefetch_depth", prefetch_depth, "batches prepared ahead of the step");
    v("reuse_example_batch", reuse_example_batch,
      "feed the first batch of the data for ever, also after resuming (for benchmarks)");
    v("log_sharding", log_sharding, "log the sharding of each array of the training step");
    v("num_train_epochs", num_train_epochs, "passes over the data if max_train_steps <= 0", at_least(-1));
  }
};

/// The loop's progress.
struct Progress {
  int64_t done = 0, last = 0;  // updates done, and the number after which the loop ends
  int64_t samples = 1;         // in one update
};
using Due = std::function<bool(const Progress&)>;
/// After every n updates; never where n is 0 or less.
Due every_steps(int64_t n);
/// After every n updates, but not after the last one.
Due every_steps_before_the_last(int64_t n);
/// When the number of samples passes a multiple of n; never where n is 0 or less.
Due every_samples(int64_t n);

/// The parts of the loop that a hook may use.
struct LoopView {
  const Progress& at;
  const Devices& devices;
  const StepPrograms& programs;
  TrainState& state;
  Recorder& recorder;
};
struct Hook {
  Due due;
  std::function<void(LoopView&)> run;
  bool after_saving = false;  // after the checkpoint of the same step; otherwise before
};

struct LoopOptions {
  std::string title;   // of the progress bar
  std::string folder;  // tensorboard/, metrics.jsonl, curves and, without the key checkpoint_dir, checkpoints/ go here
  std::string place;   // where checkpoints/ goes instead, in a bucket; empty: `folder`
  StepOptions step;
  uint64_t seed = 0;
  LoopKeys keys;
  MetricsConfig metrics;
  ProfileConfig profile;
  CompileConfig compile;
  std::string run_name;
  std::map<std::string, std::string> texts;  // for TensorBoard: tag → Markdown

  InitialValues initial;
  CompleteCheckpoint complete;  // may be empty
  /// Arrays of the batch that are the same every step (BatchField::batched is false), by field name.
  HostArrays constants;
  /// Called in this order after a step.
  std::vector<Hook> hooks;
  /// Called when metrics were written, and before a checkpoint counts in a bucket; may be empty.
  std::function<void()> flushed, before_commit;

  std::string checkpoint_dir() const {
    return keys.checkpoint_dir.empty() ? below(place.empty() ? folder : place, "checkpoints") : keys.checkpoint_dir;
  }
};

struct Trained {
  ParamTable params;
  HostArrays values;  // of the trained parameters (averages, where kept); see trained_values
  int64_t steps = 0;
};

/// Throws device when the loss is not finite, after saving the state before that step; Interrupted, after saving the
/// state of the steps done, where a signal came (base/interrupt.h).
Trained train_loop(const Devices& devices, const std::vector<const Task*>& tasks, std::unique_ptr<Dataset> data,
                   const LoopOptions& options);

}  // namespace md
