// What a run is trained on, as batches: images encoded beforehand or in the step, in aspect-ratio buckets or not,
// DreamBooth's pairs, arrays that another program computed, recorded batches.
#pragma once

#include <memory>
#include <vector>

#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/run/plan.h"

namespace md {

/// What is learned, and the batches that it is learned from.
struct TrainingData {
  DenoiseTask task;  // its batch is that of one replica
  std::unique_ptr<Dataset> batches;
  HostArrays constants = {};            // arrays of the batch that are the same in every step
  std::vector<ImageSize> buckets = {};  // sizes of the images; empty: all have the task's size
  int64_t replicas = 1;

  /// Samples of one batch, and of one update, of all replicas.
  int64_t batch_size() const { return task.batch_size * replicas; }
  int64_t update_size(const UpdateKeys& keys) const { return batch_size() * keys.gradient_accumulation_steps; }
};

/// Opens the data of a run. With train_new_vae the autoencoder is trained first. `encode`: false leaves that out, and
/// what would be encoded beforehand: batches hold pixels and token ids, of DreamBooth those of the subject.
TrainingData open_training_data(RunModels& models, bool encode = true);
/// One task for each trained expert and bucket, of its size.
std::vector<DenoiseTask> in_sizes(const RunConfig& config, const TrainingData& data);
/// Where the held-out records of eval_data_dir are.
DataSourceConfig held_out_source(const RunConfig& config, const DenoiseTask& task);
/// The first held-out records as fields of the task, one row each.
HeldOut held_out_samples(RunModels& models, const DenoiseTask& task);
/// How images or clips are prepared. Throws invalid_config for sizes that the family's models cannot take.
ImageConfig image_config(const RunConfig& config, const Family& family);
/// Where the run's data is. The emoji are drawn into a folder when first asked for.
DataSourceConfig source_config(const RunConfig& config);

}  // namespace md
