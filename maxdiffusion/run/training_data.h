// What a run is trained on, as batches, in each mode of data (settings/data_mode.h).
#pragma once

#include <memory>
#include <vector>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/run/model_components.h"
#include "maxdiffusion/run/train_plan.h"

namespace md {

struct TrainingData {
  DenoiseTask task;  // the plan's, on what the data is
  std::unique_ptr<Dataset> batches;
  HostArrays constants = {};            // arrays of the batch that are the same in every step
  std::vector<ImageSize> buckets = {};  // sizes of the images; empty: all have the task's size
};

/// With plan.autoencoder the autoencoder is trained first. `encode`: false leaves that out, and what would be encoded
/// beforehand: batches hold pixels and token ids, of DreamBooth those of the subject.
TrainingData open_training_data(ModelComponents& models, const TrainPlan& plan, bool encode = true);
/// Throws what opening the source of plan.eval does. It may be the emoji of plan.data, which are made first.
void check_held_out(const TrainPlan& plan);
/// The first held-out records of plan.eval as fields of the plan's task, one row each.
HeldOut held_out_samples(ModelComponents& models, const TrainPlan& plan);

}  // namespace md
