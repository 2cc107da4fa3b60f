// What a training run does, as one value: made from the keys and the configs of the model folder, before data is read
// or a program compiled. What comes after it takes its values from here, and no keys.
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
  AutoencoderTask task;  // its batch is that of one replica
  int64_t steps = 0, image_steps = 0;
  OptimConfig optim;  // with the rate of one sample
  ScopeOptions scope;
};
struct LoraPlan {
  LoraConfig config;                            // of the trained denoisers
  std::vector<std::string> targets;             // kinds of layers that must be there
  std::string init;                             // file of starting values; empty: random A, zero B
  std::map<std::string, std::string> metadata;  // what kohya's programs say of a training
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
  DenoiseTask task;                    // at all times; its batch is that of one replica
  std::vector<DenoiseTask> tasks;      // for each trained denoiser, on its part of the times, and each bucket
  std::vector<std::string> denoisers;  // that are trained, of Family::denoisers
  bool trains_text_encoders = false;
  std::optional<double> boundary_ratio;
  int64_t replicas = 1;
  OptimConfig optim;             // as the keys have it; loop.step has the rates of an update, and its steps
  double text_encoder_rate = 0;  // likewise
  LoopOptions loop;              // without hooks, starting values and what completes checkpoints
  std::optional<AutoencoderPlan> autoencoder;
  std::optional<LoraPlan> lora;
  std::optional<EvalPlan> eval;
  std::optional<SamplePlan> samples;

  /// Samples of one batch, and of one update, of all replicas.
  int64_t batch_size() const { return task.batch_size * replicas; }
  int64_t update_size() const { return batch_size() * loop.step.accumulation; }
  /// Whether any part of a component is trained.
  bool trains(const std::string& component) const;
};

/// Pure: no file is written, no device asked, nothing logged but warnings. What only the data knows (sizes of buckets
/// and of recorded batches, steps where epochs count) is not in it yet: see with_data. Throws invalid_config for what a
/// run would fail by.
TrainPlan plan_training(const TrainingRequest& request, const ModelFolder& folder,
                        const std::shared_ptr<const Family>& family, const DeviceCounts& counts);
/// For the models and devices that are open. Throws likewise where these cannot quantize as the keys ask.
TrainPlan plan_training(const TrainingRequest& request, const ModelComponents& models);
/// The same in parts with names, each of which adds to the plan or throws.
using PlanParts = std::vector<std::pair<const char*, std::function<void(TrainPlan&)>>>;
PlanParts plan_parts(const TrainingRequest& request, const ModelFolder& folder,
                     const std::shared_ptr<const Family>& family, const DeviceCounts& counts);
/// The plan with what its data turned out to be: the task on it, the sizes of its buckets (none: all have the task's
/// size), and the number of its samples (-1: not known). Throws invalid_config where a batch has more, or epochs cannot
/// be counted.
TrainPlan with_data(TrainPlan plan, const DenoiseTask& task, const std::vector<ImageSize>& buckets, int64_t samples);
/// One task for each trained denoiser, on its part of the times.
std::vector<DenoiseTask> tasks_per_expert(const TrainPlan& plan);
std::vector<const Task*> pointers(const std::vector<DenoiseTask>& tasks);
/// For people: a line `name: value` for each choice.
std::string describe(const TrainPlan& plan);
/// `rate`, with `scale_lr` multiplied by the samples of an update.
double scaled_rate(const OptimConfig& optim, double rate, int64_t samples);

}  // namespace md
