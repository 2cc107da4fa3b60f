// RunConfig: every struct of keys that a run reads, composed. Flat in YAML; the key names are the reference's where it
// has one. Parsing has no side effects. Source: MaxDiffusion's `configs/base_xl.yml` and its siblings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/config/config.h"
#include "maxdiffusion/mesh/mesh.h"
#include "maxdiffusion/metrics/recorder.h"
#include "maxdiffusion/optim/optimizer.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct RunKeys {
  std::string run_name, output_dir = "runs", hardware = "cpu", plugin;
  int64_t seed = 0, cpu_device_count = 1;
  int64_t checkpoint_every = -1, checkpoints_to_keep = 3;
  bool save_final_checkpoint = true;
  template <class V>
  void visit(V&& v) {
    v("run_name", run_name, "names the run's folder under output_dir");
    v("output_dir", output_dir, "root of outputs");
    v("hardware", hardware, "cpu, gpu or tpu");
    v("plugin", plugin, "path of a PJRT plugin; empty: the one of `hardware`");
    v("seed", seed, "seed of every random stream");
    v("cpu_device_count", cpu_device_count, "virtual devices of the CPU plugin");
    v("checkpoint_every", checkpoint_every, "steps between checkpoints; -1: only at the end");
    v("checkpoints_to_keep", checkpoints_to_keep, "older ones are removed; 0 keeps all");
    v("save_final_checkpoint", save_final_checkpoint, "write a checkpoint after the last step");
  }
};

struct ModelKeys {
  std::string pretrained_model_name_or_path, weights_dtype = "float32", activations_dtype = "bfloat16";
  std::string precision = "DEFAULT", attention = "dot_product", remat_policy = "NONE", prediction_type, clip_bpe_file;
  bool scan_layers = false, train_new_unet = false, train_new_vae = false, random_text_encoder = false;
  template <class V>
  void visit(V&& v) {
    v("pretrained_model_name_or_path", pretrained_model_name_or_path, "model folder in diffusers' layout");
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
  std::string dataset_name, train_data_dir, dataset_save_location, image_column = "file_name", caption_column = "text";
  int64_t resolution = 512, max_train_samples = -1;
  double per_device_batch_size = 1;
  bool center_crop = false, random_flip = false, enable_data_shuffling = true, reuse_example_batch = false;
  double caption_dropout = 0;
  template <class V>
  void visit(V&& v) {
    v("dataset_name", dataset_name, "noto-emoji: pictures of the emoji font, made on first use; empty: train_data_dir");
    v("train_data_dir", train_data_dir, "image folder with metadata.jsonl or .txt captions");
    v("dataset_save_location", dataset_save_location, "where made pictures and caches of latents are kept");
    v("image_column", image_column, "key of the picture's file in metadata.jsonl");
    v("caption_column", caption_column, "key of the caption in metadata.jsonl");
    v("resolution", resolution, "side of the training pictures, pixels");
    v("max_train_samples", max_train_samples, "take only the first N pictures; -1: all");
    v("per_device_batch_size", per_device_batch_size, "pictures per device and step; times devices must be whole");
    v("center_crop", center_crop, "crop the centre square instead of squeezing");
    v("random_flip", random_flip, "mirror pictures with probability 1/2");
    v("enable_data_shuffling", enable_data_shuffling, "new seeded order every epoch");
    v("reuse_example_batch", reuse_example_batch, "feed the first batch for ever (for benchmarks)");
    v("caption_dropout", caption_dropout, "probability of training a picture with the empty caption");
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
  double snr_gamma = -1, ema_decay = 0;
  template <class V>
  void visit(V&& v) {
    v("snr_gamma", snr_gamma, "min-SNR loss weighting; <= 0: off");
    v("ema_decay", ema_decay, "exponential moving average of the weights, saved and sampled instead of them; 0: off");
  }
};

struct SampleKeys {
  std::vector<std::string> prompt;
  std::string negative_prompt;
  double guidance_scale = 7.5;
  int64_t num_inference_steps = 30, num_images_per_prompt = 1, sample_seed = 0, sample_every = -1;
  std::map<std::string, std::string> diffusion_scheduler_config;
  template <class V>
  void visit(V&& v) {
    v("prompt", prompt, "what to draw: one text or a list");
    v("negative_prompt", negative_prompt, "what guidance steers away from");
    v("guidance_scale", guidance_scale, "classifier-free guidance; 1: off");
    v("num_inference_steps", num_inference_steps, "denoising steps");
    v("num_images_per_prompt", num_images_per_prompt, "pictures per prompt");
    v("sample_seed", sample_seed, "seed of the initial noise");
    v("sample_every", sample_every, "steps between sample grids while training; -1: only at the end");
    v("diffusion_scheduler_config", diffusion_scheduler_config, "sampler: overrides members of scheduler_config.json");
  }
};

struct RunConfig {
  RunKeys run;
  ModelKeys model;
  DataKeys data;
  OptimConfig optim;
  VaeTrainKeys vae;
  LossKeys loss;
  SampleKeys sample;
  MeshConfig mesh;
  MetricsConfig metrics;
  CompileConfig compile;

  /// Throws invalid_config, naming file, line and key.
  static RunConfig load(const std::string& file, const std::vector<std::string>& overrides);
  static RunConfig from_source(const ConfigSource& source);
  std::string to_yaml() const;
  /// output_dir/run_name.
  std::string folder() const;

  template <class V>
  void visit(V&& v) {
    run.visit(v), model.visit(v), data.visit(v), optim.visit(v), vae.visit(v), loss.visit(v), sample.visit(v);
    mesh.visit(v), metrics.visit(v), compile.visit(v);
  }
};

/// Batch over all devices. Throws invalid_config when per_device × devices is not a whole positive number.
int64_t global_batch(double per_device, int64_t devices, const char* key = "per_device_batch_size");

}  // namespace md
