// RunConfig: every struct of keys that a run reads, composed. Flat in YAML; the key names are the reference's where it
// has one. Parsing has no side effects. Source: MaxDiffusion's `configs/base_xl.yml` and its siblings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/config/config.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/mesh.h"
#include "maxdiffusion/metrics/profile.h"
#include "maxdiffusion/metrics/recorder.h"
#include "maxdiffusion/nn/scope.h"
#include "maxdiffusion/optim/optimizer.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/tasks/reference_keys.h"

namespace md {

struct RunKeys {
  std::string run_name, output_dir = "runs", hardware = "cpu", plugin;
  int64_t seed = 0, cpu_device_count = 1;
  int64_t checkpoint_every = -1, checkpoints_to_keep = 3;
  bool save_final_checkpoint = true, log_sharding = false;
  std::string base_output_directory, timing_metrics_file;
  bool save_config_to_gcs = false, write_timing_metrics = true;
  template <class V>
  void visit(V&& v) {
    v("run_name", run_name, "names the run's folder under output_dir");
    v("output_dir", output_dir, "root of outputs; empty: base_output_directory");
    v("hardware", hardware, "cpu, gpu or tpu");
    v("plugin", plugin, "path of a PJRT plugin; empty: the one of `hardware`");
    v("seed", seed, "seed of every random stream");
    v("cpu_device_count", cpu_device_count, "virtual devices of the CPU plugin");
    v("checkpoint_every", checkpoint_every, "samples between checkpoints; -1: none before the end");
    v("checkpoints_to_keep", checkpoints_to_keep, "older ones are removed; 0 keeps all");
    v("save_final_checkpoint", save_final_checkpoint, "write a checkpoint after the last step");
    v("save_config_to_gcs", save_config_to_gcs, "also write config.yml into base_output_directory/run_name");
    v("base_output_directory", base_output_directory, "see output_dir and save_config_to_gcs");
    v("timing_metrics_file", timing_metrics_file, "file that gets a line at start and end of each phase of a run");
    v("write_timing_metrics", write_timing_metrics, "false: timing_metrics_file is not written");
    v("log_sharding", log_sharding, "tell how each array of the training step lies on the mesh");
  }
};

struct ModelKeys {
  std::string pretrained_model_name_or_path, weights_dtype = "float32", activations_dtype = "bfloat16";
  std::string precision = "DEFAULT", attention = "dot_product", remat_policy = "NONE", prediction_type, clip_bpe_file;
  std::string revision, unet_checkpoint, lightning_repo, lightning_ckpt;
  bool scan_layers = false, train_new_unet = false, train_new_vae = false, random_text_encoder = false;
  int64_t flash_min_seq_length = 256;
  template <class V>
  void visit(V&& v) {
    v("pretrained_model_name_or_path", pretrained_model_name_or_path,
      "model folder in diffusers' layout, or the name of one that the Hugging Face cache holds");
    v("revision", revision, "of a name in the Hugging Face cache; empty: main");
    v("unet_checkpoint", unet_checkpoint, "folder with unet/, or the UNet's own, whose weights replace the model's");
    v("lightning_repo", lightning_repo, "folder or cached name that holds lightning_ckpt; empty: off");
    v("lightning_ckpt", lightning_ckpt, "file of a whole UNet whose weights replace the model's");
    v("flash_min_seq_length", flash_min_seq_length, "below this length flash attention falls back to dot_product");
    v("weights_dtype", weights_dtype, "dtype parameters are stored in");
    v("activations_dtype", activations_dtype, "compute dtype given to layers");
    v("precision", precision, "matrix product precision: DEFAULT, HIGH, HIGHEST");
    v("attention", attention, "attention kernel");
    v("remat_policy", remat_policy, "what the forward pass keeps: NONE (all) or FULL (block inputs)");
    v("prediction_type", prediction_type, "epsilon, v_prediction, sample; empty: the scheduler folder's");
    v("clip_bpe_file", clip_bpe_file, "merges list for a model folder without tokenizer; empty: the installed one");
    v("scan_layers", scan_layers, "repeated blocks as one loop over stacked parameters");
    v("train_new_unet", train_new_unet, "start the UNet from random weights");
    v("random_text_encoder", random_text_encoder, "text encoders of random, frozen weights: for folders without any");
    v("train_new_vae", train_new_vae, "train an autoencoder first, from random weights");
  }
};

struct DataKeys {
  std::string dataset_type, dataset_name, train_data_dir, hf_train_files, hf_data_dir, grain_train_files;
  std::string train_split = "train", dataset_save_location, image_column = "image", caption_column = "text";
  std::string hf_access_token;
  std::string data_files_pattern, extracted_files_dir, tfrecords_dir;
  int64_t no_records_per_shard = 1000;
  int64_t resolution = 512, max_train_samples = -1, synthetic_num_samples = 1000, grain_worker_count = 0,
          prefetch_depth = 2;
  double per_device_batch_size = 1;
  bool center_crop = false, random_crop = false, random_flip = false, enable_data_shuffling = true,
       reuse_example_batch = false;
  double caption_dropout = 0;
  bool enable_bucket = false, bucket_no_upscale = false, alpha_mask = false, original_size_conditioning = false;
  int64_t min_bucket_reso = 256, max_bucket_reso = 1024, bucket_reso_steps = 64;
  std::string conditioning_data_dir;
  template <class V>
  void visit(V&& v) {
    v("dataset_type", dataset_type,
      "image_folder, hf, tf, tfrecord, webdataset, grain, synthetic; empty: by the files");
    v("dataset_name", dataset_name,
      "a folder or a data set in the Hugging Face cache; noto-emoji: pictures of the emoji font, made on first use");
    v("train_data_dir", train_data_dir, "pictures with metadata.jsonl or .txt captions, or files of a kind");
    v("hf_train_files", hf_train_files, "Parquet or Arrow files: names with * and ?, separated by commas");
    v("hf_data_dir", hf_data_dir, "folder of such files");
    v("hf_access_token", hf_access_token,
      "read for the reference's files, never printed; nothing is fetched from a hub");
    v("grain_train_files", grain_train_files, "ArrayRecord files");
    v("prefetch_depth", prefetch_depth, "batches made ready ahead of the step");
    v("grain_worker_count", grain_worker_count, "threads that read and decode; 0: the cores");
    v("train_split", train_split, "split of a data set with several");
    v("synthetic_num_samples", synthetic_num_samples, "pictures of dataset_type synthetic");
    v("dataset_save_location", dataset_save_location, "where made pictures and caches of latents are kept");
    v("image_column", image_column, "column of the picture; in metadata.jsonl also file_name");
    v("caption_column", caption_column, "column of the caption");
    v("resolution", resolution, "side of the training pictures, pixels");
    v("max_train_samples", max_train_samples, "take only the first N pictures; -1: all");
    v("per_device_batch_size", per_device_batch_size, "pictures per device and step; times devices must be whole");
    v("center_crop", center_crop, "crop the centre square instead of squeezing");
    v("random_crop", random_crop, "crop a square anywhere, another each time (encoding in the step)");
    v("random_flip", random_flip, "mirror pictures with probability 1/2");
    v("enable_data_shuffling", enable_data_shuffling, "new seeded order every epoch");
    v("reuse_example_batch", reuse_example_batch, "feed the first batch for ever (for benchmarks)");
    v("caption_dropout", caption_dropout, "probability of training a picture with the empty caption");
    v("tfrecords_dir", tfrecords_dir, "prepare_tfrecords: the folder that it makes");
    v("no_records_per_shard", no_records_per_shard, "prepare_tfrecords: records of one file");
    v("data_files_pattern", data_files_pattern,
      "prepare_tfrecords: reads these files, told by their names, instead of what the other keys say");
    v("extracted_files_dir", extracted_files_dir, "read for the reference's files; .tar files are read where they lie");
    v("enable_bucket", enable_bucket, "train pictures in sizes of about their own aspect ratio, of resolution's area");
    v("min_bucket_reso", min_bucket_reso, "shortest side of a bucket, pixels");
    v("max_bucket_reso", max_bucket_reso, "longest side of a bucket, pixels");
    v("bucket_reso_steps", bucket_reso_steps, "both sides of a bucket are multiples of this");
    v("bucket_no_upscale", bucket_no_upscale, "never enlarge pictures; buckets follow from their sizes");
    v("original_size_conditioning", original_size_conditioning,
      "SDXL is told each picture's own size and crop (buckets: always); false: resolution and no crop");
    v("alpha_mask", alpha_mask, "masked loss by the pictures' alpha channel; those without one count everywhere");
    v("conditioning_data_dir", conditioning_data_dir,
      "folder with a mask (red, 0 to 255) for each picture of train_data_dir, of the same name; with masked_loss");
  }
};

/// The autoencoder stage (`train_new_vae`).
struct VaeTrainKeys {
  int64_t vae_max_train_steps = 0;
  double vae_learning_rate = 1e-3, vae_kl_weight = 1e-6, vae_per_device_batch_size = 8;
  template <class V>
  void visit(V&& v) {
    v("vae_max_train_steps", vae_max_train_steps, "optimizer updates of the autoencoder stage");
    v("vae_learning_rate", vae_learning_rate, "peak step size of the autoencoder stage");
    v("vae_kl_weight", vae_kl_weight, "weight of KL(q || N(0, 1)) per pixel value beside the reconstruction error");
    v("vae_per_device_batch_size", vae_per_device_batch_size, "pictures per device in the autoencoder stage");
  }
};

struct LossKeys {
  double snr_gamma = -1, ema_decay = 0, noise_offset = 0, input_perturbation = 0, text_encoder_learning_rate = 4.25e-6;
  int64_t gradient_accumulation_steps = 1, num_train_epochs = 1;
  bool train_text_encoder = false, cache_latents_text_encoder_outputs = true, masked_loss = false;
  std::map<std::string, std::string> timestep_bias;
  std::string replay_batches;
  template <class V>
  void visit(V&& v) {
    v("snr_gamma", snr_gamma, "min-SNR loss weighting; <= 0: off");
    v("timestep_bias", timestep_bias,
      "timesteps drawn more often: strategy (none, earlier, later, range), multiplier, "
      "portion, begin, end (exclusive)");
    v("noise_offset", noise_offset, "deviation of one shift of the noise per picture and channel; 0: off");
    v("input_perturbation", input_perturbation, "deviation of noise added to the noise, unknown to the target; 0: off");
    v("ema_decay", ema_decay, "exponential moving average of the weights, saved and sampled instead of them; 0: off");
    v("gradient_accumulation_steps", gradient_accumulation_steps, "batches per update");
    v("num_train_epochs", num_train_epochs, "passes over the data where max_train_steps <= 0");
    v("train_text_encoder", train_text_encoder, "train the text encoder as well (models with one)");
    v("text_encoder_learning_rate", text_encoder_learning_rate, "peak step size of the text encoder");
    v("cache_latents_text_encoder_outputs", cache_latents_text_encoder_outputs,
      "encode pictures and captions once; false: in every step");
    v("masked_loss", masked_loss, "weigh the loss by masks, of alpha_mask or conditioning_data_dir");
    v("replay_batches", replay_batches,
      "safetensors file whose step{i}.latents, .noise, .timesteps, .encoder_hidden_states, .text_embeds and .time_ids "
      "take the place of data and random draws");
  }
};

/// Training of one subject beside pictures of its class. Source: Ruiz et al. 2022 (DreamBooth).
struct DreamboothKeys {
  std::string instance_data_dir, class_data_dir, instance_prompt, class_prompt;
  double prior_loss_weight = 1;
  int64_t num_class_images = 100;
  bool cache_dreambooth_dataset = false;
  template <class V>
  void visit(V&& v) {
    v("instance_data_dir", instance_data_dir, "pictures of the subject; given: the run is DreamBooth");
    v("class_data_dir", class_data_dir, "pictures of its class; what is missing of num_class_images is drawn first");
    v("instance_prompt", instance_prompt, "caption of every picture of the subject");
    v("class_prompt", class_prompt, "caption of every picture of the class");
    v("prior_loss_weight", prior_loss_weight, "weight of the class's loss beside the subject's");
    v("num_class_images", num_class_images, "pictures of the class");
    v("cache_dreambooth_dataset", cache_dreambooth_dataset, "latents are always kept; read for the reference's files");
  }
};

/// Held-out loss while training.
struct EvalKeys {
  int64_t eval_every = -1, eval_max_number_of_samples_in_bucket = 60;
  std::string eval_data_dir;
  std::vector<int64_t> timesteps_list = {125, 250, 375, 500, 625, 750, 875};
  template <class V>
  void visit(V&& v) {
    v("eval_every", eval_every, "steps between evaluations of the loss on held-out data; -1: none");
    v("eval_data_dir", eval_data_dir, "held-out data, of any kind that train_data_dir may be");
    v("timesteps_list", timesteps_list, "timesteps at which the held-out loss is measured");
    v("eval_max_number_of_samples_in_bucket", eval_max_number_of_samples_in_bucket,
      "pictures at each of these timesteps, the first of the held-out data");
  }
};

struct SampleKeys {
  std::vector<std::string> prompt, negative_prompt;
  bool do_classifier_free_guidance = true;
  double guidance_scale = 7.5, guidance_rescale = 0;
  int64_t num_inference_steps = 30, sample_every = 0, clip_skip = 0;
  std::optional<int64_t> num_images_per_prompt, sample_seed, height, width;
  std::vector<int64_t> original_size, crops_coords_top_left = {0, 0}, target_size;
  std::string latents, output_type = "png";
  bool vae_slicing = false, vae_tiling = false;
  std::map<std::string, std::string> diffusion_scheduler_config;
  template <class V>
  void visit(V&& v) {
    v("prompt", prompt, "what to draw: one text or a list");
    v("negative_prompt", negative_prompt, "what guidance steers away from: one text, or one for each prompt");
    v("do_classifier_free_guidance", do_classifier_free_guidance, "false: guidance_scale is not used");
    v("guidance_scale", guidance_scale, "classifier-free guidance; <= 1: off");
    v("guidance_rescale", guidance_rescale, "part of the prediction's deviation restored after guidance; <= 0: off");
    v("num_inference_steps", num_inference_steps, "denoising steps");
    v("num_images_per_prompt", num_images_per_prompt, "null: the global batch for one prompt, 1 for several");
    v("sample_seed", sample_seed, "seed of the initial noise; null: seed");
    v("sample_every", sample_every, "steps between sample grids while training; -1: only after the last step; 0: none");
    v("height", height, "of the pictures, pixels; null: resolution");
    v("width", width, "of the pictures, pixels; null: resolution");
    v("original_size", original_size, "SDXL is told: height and width before cropping; empty: those of the picture");
    v("crops_coords_top_left", crops_coords_top_left, "SDXL is told: top and left of the crop");
    v("target_size", target_size, "SDXL is told: height and width wanted; empty: those of the picture");
    v("clip_skip", clip_skip, "layers of the text encoders left out at the end, for the prompt as in diffusers");
    v("latents", latents, "safetensors file whose tensor `latents` (standard normal, NCHW) is the initial noise");
    v("output_type", output_type, "png, np (images.safetensors) or latent (latents.safetensors)");
    v("vae_slicing", vae_slicing, "decode picture by picture");
    v("vae_tiling", vae_tiling, "decode pictures larger than the autoencoder's own in tiles that overlap");
    v("diffusion_scheduler_config", diffusion_scheduler_config, "sampler: overrides members of scheduler_config.json");
  }
};

struct ControlKeys {
  std::string controlnet_model_name_or_path, controlnet_image, controlnet_preprocessor;
  double controlnet_conditioning_scale = 1, control_guidance_start = 0, control_guidance_end = 1;
  template <class V>
  void visit(V&& v) {
    v("controlnet_model_name_or_path", controlnet_model_name_or_path,
      "ControlNet's folder; generate uses it where it is one, generate_controlnet also finds cached names");
    v("controlnet_image", controlnet_image, "picture that the ControlNet sees");
    v("controlnet_preprocessor", controlnet_preprocessor, "canny: its edges are shown instead; empty: as it is");
    v("controlnet_conditioning_scale", controlnet_conditioning_scale, "weight of what the ControlNet adds");
    v("control_guidance_start", control_guidance_start, "part of the steps before the ControlNet acts");
    v("control_guidance_end", control_guidance_end, "part of the steps after which it does not act any more");
  }
};

struct RunConfig {
  RunKeys run;
  ModelKeys model;
  DataKeys data;
  OptimConfig optim;
  VaeTrainKeys vae;
  LossKeys loss;
  EvalKeys eval;
  DreamboothKeys dreambooth;
  LoraKeys lora;
  SampleKeys sample;
  ControlKeys control;
  MeshConfig mesh;
  ShardingKeys sharding;
  MetricsConfig metrics;
  ProfileConfig profile;
  CompileConfig compile;
  ReferenceKeys reference;

  /// Throws invalid_config: a key or value that does not fit (naming file, line and key), a name that no list knows.
  static RunConfig load(const std::string& file, const std::vector<std::string>& overrides);
  static RunConfig from_source(const ConfigSource& source);
  /// Without hf_access_token.
  std::string to_yaml() const;
  /// output_dir/run_name.
  std::string folder() const;

  template <class V>
  void visit(V&& v) {
    run.visit(v), model.visit(v), data.visit(v), optim.visit(v), vae.visit(v), loss.visit(v), eval.visit(v),
        sample.visit(v);
    dreambooth.visit(v), lora.visit(v);
    control.visit(v), mesh.visit(v), sharding.visit(v), metrics.visit(v), profile.visit(v), compile.visit(v),
        reference.visit(v);
  }
};

/// The devices of `hardware` as the mesh keys arrange them. Throws as pjrt::Client::open and Mesh::make do.
Devices open_devices(const RunConfig& config);
/// What the model keys say to layers.
ScopeOptions scope_options(const ModelKeys& keys);
/// Batch over all devices. Throws invalid_config when per_device × devices is not a whole positive number.
int64_t global_batch(double per_device, int64_t devices, const char* key = "per_device_batch_size");

}  // namespace md
