// RunConfig: every struct of keys that a run reads, in one flat YAML mapping. Names are MaxDiffusion's where it has
// such a key. Each struct is declared in the module that reads it. Parsing has no side effects. Source: MaxDiffusion's
// `configs/base_xl.yml` and its siblings.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "maxdiffusion/config/config.h"
#include "maxdiffusion/data/data_keys.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/encoders/encoder_keys.h"
#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/families/added_models.h"
#include "maxdiffusion/families/learned_embeddings.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/nn/layer_keys.h"
#include "maxdiffusion/pipelines/sample_request.h"
#include "maxdiffusion/runtime/hardware_keys.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/scheduler_keys.h"
#include "maxdiffusion/settings/prompt_keys.h"
#include "maxdiffusion/settings/reference_keys.h"
#include "maxdiffusion/tasks/autoencoder.h"
#include "maxdiffusion/tasks/denoise.h"
#include "maxdiffusion/train/evaluation.h"
#include "maxdiffusion/train/loop.h"

namespace md {

struct RunKeys {
  std::string run_name, output_dir = "runs", base_output_directory, timing_metrics_file, check_dir;
  Seed seed = 0;
  int64_t sample_every = 0;
  bool enable_generate_video_for_eval = false, enable_ssim = false;
  bool save_config_to_gcs = false, write_timing_metrics = true;
  template <class V>
  void visit(V&& v) {
    v("run_name", run_name, "names the run's folder under output_dir");
    v("output_dir", output_dir, "root of outputs; empty: base_output_directory", KeyPath::output);
    v("base_output_directory", base_output_directory,
      "root of outputs if output_dir is empty; with save_config_to_gcs it also gets config.yml", KeyPath::output);
    v("save_config_to_gcs", save_config_to_gcs, "also write config.yml into base_output_directory/run_name");
    v("seed", seed, "seed of every random stream; -1: random, logged and saved");
    v("sample_every", sample_every, "steps between sample grids while training; -1: only after the last step; 0: none");
    v("enable_generate_video_for_eval", enable_generate_video_for_eval,
      "also sample the prompts after each evaluation, into separate files");
    v("enable_ssim", enable_ssim, "log the similarity (SSIM, PSNR) of the first sample before and after training");
    v("timing_metrics_file", timing_metrics_file, "file that gets a line at start and end of each phase of a run",
      KeyPath::output);
    v("check_dir", check_dir, "check: folder of the images that it makes of the data; empty: it makes none",
      KeyPath::output);
    v("write_timing_metrics", write_timing_metrics, "false: timing_metrics_file is not written");
  }
};

/// Training on one subject and images of its class. Source: Ruiz et al. 2022 (DreamBooth).
struct DreamboothKeys {
  std::string instance_data_dir, class_data_dir, instance_prompt, class_prompt;
  double prior_loss_weight = 1;
  int64_t num_class_images = 100;
  bool cache_dreambooth_dataset = false;
  template <class V>
  void visit(V&& v) {
    v("instance_data_dir", instance_data_dir, "images of the subject; given: the run is DreamBooth", KeyPath::input);
    v("class_data_dir", class_data_dir, "images of its class; those missing of num_class_images are generated first",
      KeyPath::input);
    v("instance_prompt", instance_prompt, "caption of every image of the subject");
    v("class_prompt", class_prompt, "caption of every image of the class");
    v("prior_loss_weight", prior_loss_weight, "weight of the class's loss, added to the subject's", at_least(0));
    v("num_class_images", num_class_images, "DreamBooth: images of the class that are needed");
    v("cache_dreambooth_dataset", cache_dreambooth_dataset,
      "latents are always cached; accepted for MaxDiffusion's files");
  }
};

/// How batches become an update, without the optimizer's keys.
struct UpdateKeys {
  double ema_decay = 0, text_encoder_learning_rate = 4.25e-6, loraplus_lr_ratio = 1;
  std::optional<double> unet_lr;
  std::vector<std::string> network_reg_lrs, frozen_layers;
  int64_t gradient_accumulation_steps = 1;
  template <class V>
  void visit(V&& v) {
    v("ema_decay", ema_decay, "exponential moving average of the weights, saved and sampled instead of them; 0: off",
      in_range(0, below(1)));
    v("text_encoder_learning_rate", text_encoder_learning_rate, "peak step size of the text encoder", at_least(0));
    v("unet_lr", unet_lr, "peak step size of the denoiser, whatever its kind; null: learning_rate", at_least(0));
    v("network_reg_lrs", network_reg_lrs,
      "peak step sizes by name, [\"down_blocks.0=1e-5\"]: regular expressions, found in MODEL/PATH of "
      "`inspect params`; the first one counts");
    v("loraplus_lr_ratio", loraplus_lr_ratio, "factor of the step size of LoRA's second matrices (LoRA+)",
      at_least(above(0)));
    v("frozen_layers", frozen_layers,
      "regular expressions; parameters in whose MODEL/PATH one is found keep their values");
    v("gradient_accumulation_steps", gradient_accumulation_steps, "batches per update");
  }
};

/// Access to the Hugging Face hub.
struct HubKeys {
  std::string hf_access_token;
  template <class V>
  void visit(V&& v) {
    v("hf_access_token", hf_access_token,
      "token of the Hugging Face hub, never printed; empty: HF_TOKEN or the hub's token file", Secret());
  }
};

/// The data of batches.
struct DataKeys {
  DataSourceConfig source;
  ImageKeys images;
  BatchKeys batches;
  SyntheticKeys synthetic;
  TfrecordKeys tfrecords;
  DreamboothKeys dreambooth;
  InversionKeys inversion;
  DenoiseKeys denoise;    // encoding, masks, recorded batches
  SampleFileKeys sample;  // for sizes of videos
};

/// Keys of what is trained and how.
struct LearningKeys {
  SchedulerKeys scheduler;
  ProcessKeys process;
  AutoencoderKeys vae;
  LoraKeys lora;
  OptimConfig optim;
  UpdateKeys update;
  LoopKeys loop;
  EvalKeys eval;
};

struct RunConfig : DataKeys, LearningKeys {
  RunKeys run;
  HardwareKeys hardware;
  MeshConfig mesh;
  ShardingKeys sharding;
  ModelKeys model;
  HubKeys hub;
  LayerKeys layers;
  EncoderKeys encoders;
  MetricsConfig metrics;
  ProfileConfig profile;
  PromptKeys prompts;
  MediaChunkKeys media_chunks;
  StepCacheKeys step_cache;
  ControlKeys control;
  AdapterKeys adapters;
  AddedModelKeys added_models;
  CompileConfig compile;
  ReferenceKeys reference;
  std::set<std::string> on_command_line;  // keys that the command line sets
  std::string file;                       // the loaded file; empty: none
  std::string output_dir_of_file;         // the file's value if the command line overrides it; else empty

  /// `file`: empty: only the overrides. Throws invalid_config for an unknown key, an invalid value (naming file, line
  /// and key), or an unknown name such as an optimizer's.
  static RunConfig load(const std::string& file, const std::vector<std::string>& overrides);
  static RunConfig from_source(ConfigSource source);
  /// Without hf_access_token.
  std::string to_yaml() const;

  /// f(title, structs…) for each group of keys, as help prints them.
  template <class F>
  void groups(F&& f) {
    f("run", run, loop, metrics, profile);
    f("devices", hardware, mesh, sharding, compile);
    f("model", model, hub, layers, encoders);
    f("data", source, images, batches, synthetic, tfrecords);
    f("training", optim, update, process, denoise, vae, eval);
    f("DreamBooth", dreambooth);
    f("textual inversion", inversion);
    f("LoRA", lora);
    f("samples", sample, prompts, scheduler, media_chunks, step_cache, control, adapters, added_models);
    f("without effect", reference);
  }
  template <class V>
  void visit(V&& v) {
    groups([&v](const char*, auto&... structs) { (structs.visit(v), ...); });
  }
};

/// Size of training media: squares of `resolution`; videos as sample_size.
MediaSize training_size(const SampleKeys& keys, int64_t resolution, const Family& family);
/// Samples in a batch over all devices. Throws invalid_config unless per_device × devices is a positive whole number.
int64_t global_batch(double per_device, int64_t devices, const char* key = "per_device_batch_size");
/// global_batch_size if it is set, which need not be divisible by the devices; else per_device_batch_size × devices.
/// Throws as above.
int64_t global_batch(const BatchKeys& keys, int64_t devices);
/// Rows of a batch for each replica (Devices::replicas). Throws invalid_config if the batch is not divisible.
int64_t part_of_replica(int64_t batch, int64_t replicas);

}  // namespace md
