// A run: config → devices and models → data → training, with checkpoints, evaluation and samples on the way.
#pragma once

#include "maxdiffusion/settings/requests.h"

namespace md {

/// Runs every stage that the keys request, continuing from what the run's folder holds. Writes
///   output_dir/run_name/{config.yml, metrics.jsonl, tensorboard/, checkpoints/, samples/}
/// and, with train_new_vae, vae/{…the same for the autoencoder}.
void train(const TrainingRequest& request);

/// Looks at what a run needs up to its first step, and says what it would warn of or fail by: keys, sizes, samples,
/// evaluation, outputs; all captions and sizes of images, the first batch as it is read; names and shapes of weights;
/// what changed since the run was started. Nothing is encoded, compiled, or written but a probe in each output folder
/// (and the emoji, where these are the data). Throws, with the code of the first fault, where a run would fail.
void check_run(const TrainingRequest& request);

/// Writes the data set of a run as TFRecord files into `tfrecords_dir`; see TfrecordShards. With
/// cache_latents_text_encoder_outputs the records hold encoded samples (RecordFormat::to_record), from which
/// dataset_type=tfrecord trains. Otherwise they hold images as they are stored and captions, under image_column and
/// caption_column. random_flip adds every image mirrored. Returns the number of records.
int64_t prepare_tfrecords(const TrainingRequest& request);

}  // namespace md
