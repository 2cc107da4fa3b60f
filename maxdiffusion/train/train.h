// A run: config → devices → model folder → data → stages. Each stage is one call of the loop.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "maxdiffusion/tasks/encode.h"
#include "maxdiffusion/tasks/run_config.h"
#include "maxdiffusion/train/loop.h"

namespace md {

/// What drawing pictures needs, while training and after it.
struct TrainedModel {
  const Devices& devices;
  const RunConfig& config;
  const ModelFolder& folder;
  const WeightsOf& weights;
  TextEncoder& text_encoder;
  PictureCoder& coder;
  int64_t step;
  std::string samples;  // folder for pictures
};
/// Draws and writes pictures; given by apps, so that training and sampling stay strangers. Returns the path to print.
using OnSample = std::function<std::string(const TrainedModel&)>;

/// Runs every stage that the config asks for, from where the run's folder stands. Writes
///   output_dir/run_name/{config.yml, metrics.jsonl, tensorboard/, checkpoints/, samples/}
/// and, with train_new_vae, vae/{…the same for the autoencoder}.
void train(const RunConfig& config, const OnSample& on_sample);

/// Writes the data set of a config as TFRecord files into `tfrecords_dir`; see TfrecordShards. With
/// cache_latents_text_encoder_outputs records are what dataset_type=tfrecord trains from then, encoded by the programs
/// that fill the cache of latents: with two text encoders the features of sdxl_cached_columns() (a latent drawn from
/// the posterior by the seed and the number of the record), with one those of laion_cached_columns(). Otherwise they
/// are pictures as they are stored, and captions, under image_column and caption_column. random_flip adds each
/// mirrored. Returns the number of records.
int64_t prepare_tfrecords(const RunConfig& config);

}  // namespace md
