// A run: config → devices and models → data → training, with checkpoints, evaluation and samples on the way.
#pragma once

#include "maxdiffusion/run/run_config.h"

namespace md {

/// Runs every stage that the config asks for, continuing from what the run's folder holds. Writes
///   output_dir/run_name/{config.yml, metrics.jsonl, tensorboard/, checkpoints/, samples/}
/// and, with train_new_vae, vae/{…the same for the autoencoder}.
void train(const RunConfig& config);

/// Writes the data set of a config as TFRecord files into `tfrecords_dir`; see TfrecordShards. With
/// cache_latents_text_encoder_outputs the records hold encoded samples (Family::to_encoded), from which
/// dataset_type=tfrecord trains. Otherwise they hold images as they are stored and captions, under image_column and
/// caption_column. random_flip adds every image mirrored. Returns the number of records.
int64_t prepare_tfrecords(const RunConfig& config);

}  // namespace md
