// The loop: one dataset, one state, from the newest checkpoint to the last step. It never waits for the device (on CPUs
// a step waits for the previous one: pjrt/executable.h): the state is donated from step to step, batches are
// prefetched, metrics are read one step late. Work between steps (evaluation, samples) is a hook: a condition and a
// function.
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
  int64_t done = 0, last = 0;  // updates done, and number of the last update
  int64_t samples = 1;         // per update
};
using Due = std::function<bool(const Progress&)>;
/// After every n updates; never if n ≤ 0.
Due every_steps(int64_t n);
/// After every n updates, but not after the last one.
Due every_steps_before_the_last(int64_t n);
/// When the number of samples passes a multiple of n; never if n ≤ 0.
Due every_samples(int64_t n);

/// The parts of the loop that a hook may use.
struct LoopView {
  const Progress& progress;
  const Devices& devices;
  const StepPrograms& programs;
  TrainState& state;
  Recorder& recorder;
};
struct Hook {
  Due due;
  std::function<void(LoopView&)> run;
  bool after_saving = false;  // runs after the checkpoint of the same step; false: before it
};

struct LoopOptions {
  std::string title;   // of the progress bar
  std::string folder;  // tensorboard/, metrics.jsonl, curves and, without the key checkpoint_dir, checkpoints/ go here
  std::string place;   // remote folder for checkpoints/; empty: `folder`
  StepOptions step;
  uint64_t seed = 0;
  DataIdentity dataset;                // of the data that train_loop gets
  std::set<std::string> also_trained;  // StateSource::also_trained
  LoopKeys keys;
  MetricsConfig metrics;
  ProfileConfig profile;
  CompileConfig compile;
  double later_device_flops = 0;  // RecorderOptions::later_device_flops
  std::string run_name;
  std::map<std::string, std::string> texts;  // for TensorBoard: tag → Markdown

  InitialValues initial;
  CompleteCheckpoint complete;  // may be empty
  /// Called when the state is on the devices: nothing of the run is refused any more. May be empty.
  std::function<void()> begun;
  /// Throws io if the folder that the run writes to is there no more: the state is then saved again, and the loop
  /// throws the error. Called before the run writes. May be empty.
  std::function<void()> check_folder;
  /// Arrays of the batch that are equal in every step (BatchField::batched is false), by field name.
  HostArrays constants;
  /// Run after a step in this order.
  std::vector<Hook> hooks;
  /// Called when metrics are written, and before a checkpoint in a bucket becomes complete; may be empty.
  std::function<void()> flushed, before_commit;

  std::string checkpoint_dir() const {
    return keys.checkpoint_dir.empty() ? below(place.empty() ? folder : place, "checkpoints") : keys.checkpoint_dir;
  }
};

struct Trained {
  ParamTable params;
  HostArrays values;  // of the trained parameters (moving averages if there are any); see trained_values
  int64_t steps = 0;
};

/// Throws device if a loss or gradient norm is not finite: after saving the state before that step, if the next batches
/// have a finite loss there; otherwise the weights have diverged, the state is not saved, and a checkpoint that holds
/// it is renamed as damaged. Throws io after saving the state if the folder that the run or its checkpoints are written
/// to was deleted meanwhile. Throws Interrupted on a signal, after saving the state of the finished steps
/// (base/interrupt.h).
Trained train_loop(const Devices& devices, const std::vector<const Task*>& tasks, std::unique_ptr<Dataset> data,
                   const LoopOptions& options);

}  // namespace md
