// Keys of training data, except its location (records/open_source.h): how images are prepared, batched and written as
// TFRecord files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"

namespace md {

struct ImageKeys {
  int64_t resolution = 512;
  bool center_crop = false, random_crop = false, random_flip = false;
  bool enable_bucket = false, bucket_no_upscale = false, alpha_mask = false, original_size_conditioning = false;
  double unmasked_weight = 0;
  int64_t min_bucket_reso = 256, max_bucket_reso = 1024, bucket_reso_steps = 64;
  std::vector<int64_t> frame_buckets;
  template <class V>
  void visit(V&& v) {
    v("resolution", resolution, "side of the training images, pixels", in_range(1, 65536));
    v("center_crop", center_crop, "crop the centre square instead of squeezing");
    v("random_crop", random_crop, "crop a square at a random place, another each time (with encoding in the step)");
    v("random_flip", random_flip, "mirror images with probability 1/2");
    v("enable_bucket", enable_bucket, "train images in sizes of about their own aspect ratio, of resolution's area");
    v("min_bucket_reso", min_bucket_reso, "shortest side of a bucket, pixels");
    v("max_bucket_reso", max_bucket_reso, "longest side of a bucket, pixels");
    v("bucket_reso_steps", bucket_reso_steps, "both sides of a bucket are multiples of this");
    v("bucket_no_upscale", bucket_no_upscale, "never enlarge images; buckets follow from their sizes");
    v("frame_buckets", frame_buckets,
      "numbers of frames of clips: each is trained with the most of these that it has; empty: num_frames");
    v("original_size_conditioning", original_size_conditioning,
      "condition on each image's own size and crop (buckets: always); false: on resolution and no crop");
    v("unmasked_weight", unmasked_weight, "least weight of the loss where a mask is dark", in_range(0, 1));
    v("alpha_mask", alpha_mask, "masked loss by the images' alpha channel; those without one count everywhere");
  }
};

struct BatchKeys {
  double per_device_batch_size = 1;
  int64_t global_batch_size = 0, grain_worker_count = 0;
  bool enable_data_shuffling = true;
  std::string dataset_save_location;
  template <class V>
  void visit(V&& v) {
    v("per_device_batch_size", per_device_batch_size,
      "samples per device and step; may be a fraction (0.25 on 8 devices: a batch of 2), times the devices must be a "
      "whole number");
    v("global_batch_size", global_batch_size,
      "samples per step on all devices together; 0: per_device_batch_size times the devices");
    v("grain_worker_count", grain_worker_count, "threads that read and decode; 0: the cores");
    v("enable_data_shuffling", enable_data_shuffling, "new seeded order every epoch");
    v("dataset_save_location", dataset_save_location,
      "folder of generated datasets and caches of latents; empty: caches in the run's folder", KeyPath::output);
  }
};

/// Sizes of the encoded samples of dataset_type synthetic; null: those of the model and of the media that it generates.
struct SyntheticKeys {
  std::optional<int64_t> synthetic_override_height, synthetic_override_width, synthetic_override_num_frames,
      synthetic_override_max_sequence_length, synthetic_override_text_embed_dim,
      synthetic_override_num_channels_latents, synthetic_override_vae_scale_factor_spatial,
      synthetic_override_vae_scale_factor_temporal;
  template <class V>
  void visit(V&& v) {
    v("synthetic_override_height", synthetic_override_height,
      "height in pixels of synthetic encoded samples; null: height");
    v("synthetic_override_width", synthetic_override_width,
      "width in pixels of synthetic encoded samples; null: width");
    v("synthetic_override_num_frames", synthetic_override_num_frames,
      "frames of synthetic encoded samples; null: num_frames");
    v("synthetic_override_max_sequence_length", synthetic_override_max_sequence_length,
      "tokens per caption of synthetic encoded samples; null: max_sequence_length");
    v("synthetic_override_text_embed_dim", synthetic_override_text_embed_dim,
      "width of the text embeddings of synthetic encoded samples; null or the model's");
    v("synthetic_override_num_channels_latents", synthetic_override_num_channels_latents,
      "channels of the latents of synthetic encoded samples; null or the model's");
    v("synthetic_override_vae_scale_factor_spatial", synthetic_override_vae_scale_factor_spatial,
      "pixels per latent cell of synthetic encoded samples; null or the model's");
    v("synthetic_override_vae_scale_factor_temporal", synthetic_override_vae_scale_factor_temporal,
      "frames per latent frame of synthetic encoded samples; null or the model's");
  }
};

struct TfrecordKeys {
  std::string tfrecords_dir, data_files_pattern, extracted_files_dir;
  int64_t no_records_per_shard = 1000, num_eval_samples = 420;
  bool enable_eval_timesteps = false;
  template <class V>
  void visit(V&& v) {
    v("tfrecords_dir", tfrecords_dir, "prepare_tfrecords: the folder that is written", KeyPath::output);
    v("no_records_per_shard", no_records_per_shard, "prepare_tfrecords: records per file");
    v("enable_eval_timesteps", enable_eval_timesteps,
      "prepare_tfrecords: writes num_eval_samples records, each with a timestep, as many for each of timesteps_list");
    v("num_eval_samples", num_eval_samples, "prepare_tfrecords: records that are written with enable_eval_timesteps");
    v("data_files_pattern", data_files_pattern,
      "prepare_tfrecords: reads these files, whose kind follows from their names, instead of the config's data",
      KeyPath::input);
    v("extracted_files_dir", extracted_files_dir, "accepted for MaxDiffusion's files; .tar files are read in place");
  }
};

}  // namespace md
