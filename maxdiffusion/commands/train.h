// A run: config → devices and models → data → training, with checkpoints, evaluation and samples on the way.
#pragma once

#include "maxdiffusion/settings/requests.h"

namespace md {

/// Runs every stage that the keys request and resumes from what the run's folder holds. Writes
///   output_dir/run_name/{config.yml, metrics.jsonl, tensorboard/, checkpoints/, samples/}
/// and, with train_new_vae, vae/{…the same for the autoencoder}.
void train(const TrainingRequest& request);

/// Checks what a run needs up to its first step, and logs what the run would warn of: keys, sizes, samples, evaluation,
/// outputs; all captions and image sizes, and the first batch; names and shapes of weights; changes since the run was
/// started. Nothing is encoded or compiled. Nothing is written but a probe in each output folder (and the emoji, if
/// they are the data). Throws the first error that the run would throw.
void check_run(const TrainingRequest& request);

/// Writes the dataset of a run as TFRecord files into `tfrecords_dir`; see TfrecordShards. With
/// cache_latents_text_encoder_outputs the records hold encoded samples (RecordFormat::to_record), from which
/// dataset_type=tfrecord trains. Otherwise they hold images as stored and captions, under image_column and
/// caption_column. random_flip adds a mirrored copy of every image. Returns the number of records.
int64_t prepare_tfrecords(const TrainingRequest& request);

}  // namespace md
