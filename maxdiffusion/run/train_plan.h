// The plan of a training run as one value, computed from the keys and the configs of the model folder before data is
// read or a program compiled. Later stages read this plan and no keys.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/run/data_plan.h"
#include "maxdiffusion/run/model_components.h"
#include "maxdiffusion/tasks/autoencoder.h"
#include "maxdiffusion/train/loop.h"

namespace md {

/// The stage before the denoiser's with train_new_vae.
struct AutoencoderPlan {
  AutoencoderTask task;  // batch size of one replica
  int64_t steps = 0, image_steps = 0;
  OptimConfig optim;  // with the learning rate for one sample
  ScopeOptions scope;
};
struct LoraPlan {
  LoraConfig config;                            // of the trained denoisers
  std::vector<std::string> targets;             // layers that must exist
  std::string init;                             // file of initial values; empty: random A, zero B
  MissingKeys missing = MissingKeys::refused;   // in that file
  std::map<std::string, std::string> metadata;  // kohya's training metadata
};
/// Held-out loss.
struct EvalPlan {
  EvalKeys keys;
  DataSourceConfig source;  // with array_columns: of encoded samples
  ImageConfig images;       // otherwise
};
struct TrainPlan {
  RunInfo run;
  DataPlan data;
  DenoiseTask task;                    // over all timesteps; batch size of one replica
  std::vector<DenoiseTask> tasks;      // one for each trained denoiser, with its range of timesteps, and each bucket
  std::vector<std::string> denoisers;  // the trained ones of FamilySpec::denoisers
  bool trains_text_encoders = false;
  std::optional<InversionKeys> inversion = {};  // if set, embeddings of its word alone are trained
  std::optional<double> boundary_ratio;
  int64_t replicas = 1;
  OptimConfig optim;  // as set by the keys; loop.step has learning rates per update and the number of updates
  double text_encoder_rate = 0;                               // likewise
  std::vector<std::pair<std::string, double>> rates_by_name;  // likewise; see StepOptions
  LoopOptions loop;  // without hooks, initial values and completion of checkpoints
  std::optional<AutoencoderPlan> autoencoder;
  std::optional<LoraPlan> lora;
  std::optional<EvalPlan> eval;
  std::optional<SamplePlan> samples;

  /// Samples of one batch, and of one update, over all replicas.
  int64_t batch_size() const { return task.batch_size * replicas; }
  int64_t update_size() const { return batch_size() * loop.step.accumulation; }
  /// Whether any part of a component is trained.
  bool trains(const std::string& component) const;
};

/// Pure: writes no file, uses no device, logs only warnings. Values that depend on the data (sizes of buckets and of
/// recorded batches, number of steps if epochs are counted) are set by with_data. Throws invalid_config for what would
/// make the run fail.
TrainPlan plan_training(const TrainingRequest& request, const ModelFolder& folder,
                        const std::shared_ptr<const Family>& family, const DeviceCounts& counts);
/// Like the above, for open models and devices. Throws invalid_config if these do not support the quantization of the
/// keys.
TrainPlan plan_training(const TrainingRequest& request, const ModelComponents& models);
/// The same in parts with names, each of which adds to the plan or throws.
using PlanParts = std::vector<std::pair<const char*, std::function<void(TrainPlan&)>>>;
PlanParts plan_parts(const TrainingRequest& request, const ModelFolder& folder,
                     const std::shared_ptr<const Family>& family, const DeviceCounts& counts);
/// Throws invalid_config if a batch is larger than this number of samples (-1: unknown).
void check_batch_size(const TrainPlan& plan, int64_t samples);
/// The plan completed from its data: the task on it, the sizes of its buckets (none: all have the task's size), and the
/// number of its samples (-1: unknown). Throws invalid_config if a batch is larger than the data, or epochs cannot be
/// counted.
TrainPlan with_data(TrainPlan plan, const DenoiseTask& task, const std::vector<ImageSize>& buckets, int64_t samples);
/// One task for each trained denoiser, with its range of timesteps.
std::vector<DenoiseTask> tasks_per_expert(const TrainPlan& plan);
std::vector<const Task*> pointers(const std::vector<DenoiseTask>& tasks);
/// For the log: one line `name: value` for each setting.
std::string describe(const TrainPlan& plan);
/// `rate`, with `scale_lr` multiplied by the number of samples of an update.
double scaled_rate(const OptimConfig& optim, double rate, int64_t samples);

}  // namespace md
