// A run's training data as batches, for each data mode (settings/data_mode.h).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/run/model_components.h"
#include "maxdiffusion/run/train_plan.h"
#include "maxdiffusion/train/state_info.h"

namespace md {

struct TrainingData {
  DenoiseTask task;  // the plan's task, adapted to the data
  std::unique_ptr<Dataset> batches;
  DataIdentity dataset = {};            // not known of recorded batches
  HostArrays constants = {};            // arrays of the batch that are equal in every step
  std::vector<ImageSize> buckets = {};  // sizes of the images; empty: all have the task's size
};

/// Opens the training data. With plan.autoencoder, trains the autoencoder first. Encodes the samples that the run reads
/// until its last step, from the beginning or from `resumed`, the checkpoint from which it continues.
TrainingData open_training_data(ModelComponents& models, const TrainPlan& plan,
                                const std::optional<StateInfo>& resumed = {});
/// The same without training or encoding: batches hold pixels and token ids, for DreamBooth those of the subject.
TrainingData open_unencoded_data(ModelComponents& models, const TrainPlan& plan);
/// Throws the errors of opening plan.eval's source. If that is plan.data's emoji, renders them first.
void check_held_out(const TrainPlan& plan);
/// The first held-out records of plan.eval as fields of the plan's task, one row each.
HeldOut held_out_samples(ModelComponents& models, const TrainPlan& plan);

}  // namespace md
