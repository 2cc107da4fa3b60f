// The loop: one dataset, one state, from the newest checkpoint to the last step. Nothing in it waits for the device:
// the state is donated from step to step, batches are prefetched, metrics are read one step late. There is one task, or
// several that differ in the shapes of their batches alone (aspect-ratio buckets): each has its program, all compiled
// before the first step, and a batch goes to the one whose shapes it has.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/metrics/profile.h"
#include "maxdiffusion/metrics/recorder.h"
#include "maxdiffusion/tasks/run_config.h"
#include "maxdiffusion/train/step.h"

namespace md {

/// Host values of a trained model: what is sampled from and saved in the model's folder (the average, where kept).

struct LoopOptions {
  std::string title;   // of the progress bar
  std::string folder;  // tensorboard/, metrics.jsonl and curves go here
  std::string checkpoint_dir;
  StepOptions step;
  uint64_t seed = 0;
  int64_t checkpoint_every = -1;  // samples
  int64_t checkpoints_to_keep = 3, sample_every = 0, eval_every = -1;
  bool save_final_checkpoint = true;
  bool reuse_example_batch = false, log_sharding = false;
  int64_t prefetch_depth = 2;
  MetricsConfig metrics;
  ProfileConfig profile;
  CompileConfig compile;
  std::string run_name;
  std::map<std::string, std::string> texts;  // for TensorBoard: tag → Markdown
};

/// What the keys say of every stage of a run; outputs go to `folder`.
LoopOptions loop_options(const RunConfig& c, const std::string& folder, const std::string& title);
/// With `scale_lr`, the rate times the samples of an update.
double scaled_rate(const OptimConfig& optim, double rate, int64_t samples);

struct LoopCallbacks {
  /// Starting values of parameters, by input name, in two calls: the first throws where there are none, the second
  /// makes them while the program is compiled. The table is the whole one, or that of the frozen parameters where a
  /// checkpoint holds the others; it lives until the second call has returned.
  std::function<std::function<HostArrays()>(const ParamTable&)> initial;
  /// Arrays of the batch that are the same every step (BatchField::batched is false), by field name.
  HostArrays constants;
  /// What makes the checkpoint a whole model folder: weights of other models, configs, tokenizers. `trained`: values of
  /// the trained parameters by input name (averages, where kept). Called on the writer's thread.
  std::function<void(CheckpointContent&, const ParamTable&, const HostArrays& trained)> complete;
  /// Called every `eval_every` steps; `value` is the array of a parameter by input name, of trained ones as they would
  /// be saved. What it returns joins the step's metrics. May be empty.
  std::function<std::map<std::string, double>(int64_t step, const std::function<Array*(const std::string&)>& value)>
      evaluate;
  /// Called every `sample_every` steps with the trained values that would be saved. May be empty.
  std::function<void(int64_t step, const ParamTable&, const HostArrays& trained)> sample;
};

struct Trained {
  ParamTable params;
  HostArrays values;  // of the trained parameters (averages, where kept)
  int64_t steps = 0;
};

/// Throws device when the loss is not finite, after saving the state before that step.
Trained train_loop(const Devices& devices, const std::vector<const Task*>& tasks, std::unique_ptr<Dataset> data,
                   const LoopOptions& options, const LoopCallbacks& callbacks);

}  // namespace md
