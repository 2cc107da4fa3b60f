#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/schedulers/timestep_sampling.h"
#include "maxdiffusion/settings/key_rules.h"

namespace md {
namespace {

using Keys = std::vector<std::string>;

Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
Keys operator-(Keys a, const Keys& b) {
  std::erase_if(a, [&](const std::string& key) { return std::ranges::count(b, key) > 0; });
  return a;
}

Keys starting_with(const std::string& prefix, Keys a) {
  std::erase_if(a, [&](const std::string& key) { return !key.starts_with(prefix); });
  return a;
}

/// The keys of a struct.
template <class T>
Keys of() {
  Keys names;
  T{}.visit([&](const char* name, auto&, auto&&...) { names.emplace_back(name); });
  return names;
}

Keys keys_of_optimizers() {
  Keys names;
  for (const OptimizerKey& k : optimizer_keys()) names.emplace_back(k.name);
  return names;
}

/// A run, for the rules below.
struct Situation {
  const RunConfig& c;
  const ModelFolder& folder;
  const Family& family;
  const Devices& devices;
  const MediaSize& sampled;
  std::string_view command;
  const KeyChanges keys{c};
  const Mesh& mesh = devices.mesh();

  bool trains() const { return command == "train"; }
  bool generates() const { return command == "generate"; }
  bool is_dreambooth() const { return !c.dreambooth.instance_data_dir.empty(); }
  bool videos() const { return family.spec().videos(); }
  bool begins_with_image() const {
    return (!c.sample.image.empty() || !c.sample.image_url.empty()) && family.spec().image_to_image &&
           !family.image_conditioning();
  }
  /// Whether training generates samples.
  bool samples_while_training() const {
    return trains() && !c.sample.prompt.empty() &&
           (c.run.sample_every != 0 || c.run.enable_ssim || c.run.enable_generate_video_for_eval);
  }
  bool samples() const { return generates() || samples_while_training() || (trains() && is_dreambooth()); }
  bool is_flow_matching() const {
    return md::is_flow_matching(training_config(folder.scheduler_config(), c.scheduler));
  }
  /// Whether noise levels are shifted depending on the sample's size.
  bool shifts_by_size() const {
    return sampling_config(folder.scheduler_config(), c.scheduler).value("use_dynamic_shifting", false);
  }
  bool guides() const {
    if (!c.sample.do_classifier_free_guidance || family.spec().unguided_only) return false;
    if (family.spec().true_guidance) return c.sample.true_cfg_scale > 1;
    return std::max(c.sample.guidance_scale_high.value_or(c.sample.guidance_scale),
                    c.sample.guidance_scale_low.value_or(c.sample.guidance_scale)) > family.spec().unguided;
  }
  const char* why_unguided() const {
    if (family.spec().unguided_only) return "this model was distilled to sample without guidance";
    if (family.spec().true_guidance)
      return "there is no guidance (true_cfg_scale up to 1, or do_classifier_free_guidance=false)";
    if (family.spec().unguided > 0)
      return "there is no guidance (guidance_scale up to 1, or do_classifier_free_guidance=false)";
    return "there is no guidance (guidance_scale=0, or do_classifier_free_guidance=false)";
  }
  bool two() const { return family.spec().denoisers.size() == 2; }
  bool has_tokenizer() const {
    for (const char* file : {"vocab.json", "tokenizer.json"})
      if (std::filesystem::exists(folder.path() + "/tokenizer/" + file)) return true;
    return false;
  }
  /// Whether scan_layers stacks any layers.
  bool repeats() const {
    const ParamTable params = folder.params(family.spec().denoisers, scope_options(c.layers));
    return std::ranges::any_of(params.params(), [](const Param& p) { return p.stacked > 0; });
  }
  /// Whether the number of tokens of captions is set by the key.
  bool reads_length() const {
    return std::ranges::any_of(family.spec().text_encoders, [&](const TextEncoderSpec& e) {
      return e.max_tokens - e.template_tokens == c.model.max_sequence_length;
    });
  }
  bool reads_layers() const {
    return std::ranges::any_of(family.spec().text_encoders, [](const TextEncoderSpec& e) { return !e.layers.empty(); });
  }
  std::string ignored_by_optimizer(const std::string& key) const {
    for (const OptimizerKey& k : c.optim.key_values)
      if (key == k.name && c.optim.optimizer != k.optimizer)
        return fmt::format("only optimizer={} reads it", k.optimizer);
    return "";
  }
  int64_t height() const { return sampled.height; }
  /// Whether a sample is decoded in tiles if the key requests it.
  bool tiles() const {
    const Dims latent = family.latent_dims(sampled);
    return !videos() && family.spec().autoencoder->decoder_tile > 0 &&
           std::max(latent[0], latent[1]) > family.spec().autoencoder->decoder_tile;
  }
  int64_t slices() const { return std::max<int64_t>(topology(devices.client()).slices(), devices.replicas()); }
  /// A size set by the mesh's keys.
  int64_t size(const std::string& key) const {
    int64_t found = 1;
    MeshConfig mesh = c.mesh;
    mesh.visit([&](const char* name, auto& value, auto&&...) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, int64_t>)
        if (name == key) found = value;
    });
    return found;
  }
  /// The key that sets the location of the data; later ones are ignored.
  std::string data_key() const {
    if (!c.denoise.replay_batches.empty()) return "replay_batches";
    if (is_dreambooth()) return "instance_data_dir";
    if (!c.tfrecords.data_files_pattern.empty() && command == "prepare_tfrecords") return "data_files_pattern";
    if (c.source.dataset_type == "synthetic") return "dataset_type=synthetic";
    for (const auto& [key, place] : places())
      if (!place.empty()) return key;
    return "";
  }
  bool reads_data_of(const std::string& key) const { return data_key().empty() || data_key() == key; }
  std::vector<std::pair<const char*, std::string>> places() const {
    return {{"dataset_config", c.source.dataset_config},
            {"hf_train_files", c.source.hf_train_files},
            {"grain_train_files", c.source.grain_train_files},
            {"train_data_dir", c.source.train_data_dir},
            {"hf_data_dir", c.source.hf_data_dir},
            {"dataset_name", c.source.dataset_name}};
  }
};

/// Why a key is ignored; empty: it is used.
using Reason = std::function<std::string(const Situation&, const std::string& key)>;

struct IgnoredRule {
  Keys keys;
  Reason reason;
  /// Whether the key is normal in a file that other commands, models or machines share.
  bool shared = false;
};

std::string unless(bool read, const char* reason) { return read ? "" : reason; }
Reason always(const char* reason) {
  return [=](const Situation&, const std::string&) { return reason; };
}
/// Ignored unless another key is set, or has a given value.
Reason unless_set(const char* other, const char* reason) {
  return [=](const Situation& s, const std::string&) { return unless(s.keys.changed(other), reason); };
}
Reason if_set(const char* other, const char* reason) {
  return [=](const Situation& s, const std::string&) { return unless(!s.keys.changed(other), reason); };
}

/// A reason as an expression of a situation `s` and a `key`.
#define RULE(...)                                                                                   \
  []([[maybe_unused]] const Situation& s, [[maybe_unused]] const std::string& key) -> std::string { \
    return __VA_ARGS__;                                                                             \
  }

const std::vector<IgnoredRule>& rules() {
  const Keys sizes = {"height", "width", "num_frames", "fps"};  // of videos, for which they also affect training
  static const std::vector<IgnoredRule> all = {
      // Keys of other commands.
      {of<TfrecordKeys>(), RULE(unless(s.command == "prepare_tfrecords", "only prepare_tfrecords reads it")), true},
      {{"check_dir"}, RULE("only check reads it"), true},
      {{"compile_target", "compile_topology_num_slices"}, RULE("only compile and plan read it"), true},
      {of<DataSourceConfig>() + (of<ImageKeys>() - Keys{"resolution"}) +
           Keys{"timesteps_list", "encoder_batch_size", "dataset_save_location", "cache_latents_text_encoder_outputs"},
       RULE(unless(!s.generates(), "generate reads no data")), true},
      {of<OptimConfig>() + of<UpdateKeys>() + (of<LoopKeys>() - Keys{"checkpoint_dir"}) + of<ProcessKeys>() +
           of<AutoencoderKeys>() + of<DreamboothKeys>() + of<InversionKeys>() + of<SyntheticKeys>() +
           of<MetricsConfig>() + (of<EvalKeys>() - Keys{"timesteps_list"}) +
           (of<DenoiseKeys>() - Keys{"cache_latents_text_encoder_outputs", "masked_loss"}) +
           Keys{"train_lora",
                "lora_rank",
                "lora_alpha",
                "lora_target_modules",
                "lora_init",
                "adapter",
                "use_rslora",
                "rank_pattern",
                "alpha_pattern",
                "conv_dim",
                "conv_alpha",
                "lora_dropout",
                "rank_dropout",
                "module_dropout",
                "decompose_factor",
                "decompose_both",
                "feedforward_modules",
                "sample_every",
                "enable_generate_video_for_eval",
                "enable_ssim",
                "timing_metrics_file",
                "write_timing_metrics",
                "save_config_to_gcs",
                "remat_policy",
                "names_which_can_be_saved",
                "names_which_can_be_offloaded",
                "dropout",
                "skip_first_n_steps_for_profiler",
                "profiler_steps",
                "train_expert",
                "enable_data_shuffling",
                "grain_worker_count",
                "masked_loss",
                "data_sharding"},
       RULE(unless(s.trains(), "only training reads it")), true},
      {Keys{"lora_files", "lora_scales", "lora_text_scales", "lora_block_weights", "lora_steps", "lora_config",
            "enable_lora", "output_type", "vae_slicing"} +
           of<ControlKeys>() + of<AdapterKeys>() + of<PromptKeys>() + of<AddedModelKeys>() + Keys{"preview_every"},
       RULE(unless(s.generates(), "only generate reads it")), true},
      {{"lora_missing_keys"},
       RULE(unless(s.generates()
                       ? !s.c.lora.lora_files.empty() || !s.c.lora.lora_config.empty() || !s.c.prompts.lora_dir.empty()
                       : !s.c.lora.lora_init.empty(),
                   "no LoRA file is read")),
       true},
      {(of<SampleFileKeys>() - sizes - Keys{"guidance_scale", "boundary_ratio"}) + of<StepCacheKeys>() +
           Keys{"scheduler", "sigma_schedule", "flow_shift", "time_shift", "base_shift", "max_shift",
                "vae_decode_chunk"},
       RULE(unless(s.samples(), "no samples are generated (sample_every=0, or no prompt)")), true},
      {sizes, RULE(unless(s.samples() || s.videos(), "training images have the size of resolution")), true},
      {{"guidance_scale"},
       RULE(unless(s.samples() || s.family.spec().embedded_guidance,
                   "no samples are generated (sample_every=0, or no prompt)")),
       true},
      {{"guidance_scale"},
       RULE(unless(s.family.spec().embedded_guidance || !s.family.spec().true_guidance,
                   "this model is guided by true_cfg_scale"))},
      {{"boundary_ratio"},
       RULE(unless(s.samples() || s.two(), "no samples are generated (sample_every=0, or no prompt)")),
       true},
      {{"base_output_directory"},
       RULE(unless(s.c.run.save_config_to_gcs || s.c.run.output_dir == s.c.run.base_output_directory,
                   "output_dir is given, and save_config_to_gcs=false")),
       true},

      {{"apg_eta", "apg_norm_threshold", "apg_momentum"},
       RULE(unless(s.c.sample.guidance_method == "apg", "only guidance_method=apg reads it"))},
      {{"cfg_zero_init_steps"},
       RULE(unless(s.c.sample.guidance_method == "cfg_zero", "only guidance_method=cfg_zero reads it"))},
      {{"cfg_pp_lambda"}, RULE(unless(s.c.sample.guidance_method == "cfg_pp", "only guidance_method=cfg_pp reads it"))},
      {{"pag_adaptive_scale", "pag_applied_layers"}, RULE(unless(s.c.sample.pag_scale > 0, "pag_scale is 0"))},
      {{"skip_layer_guidance_start", "skip_layer_guidance_stop", "skip_layer_guidance_layers"},
       RULE(unless(s.c.sample.skip_layer_guidance_scale > 0, "skip_layer_guidance_scale is 0"))},

      // Updates.
      {keys_of_optimizers(), RULE(s.ignored_by_optimizer(key))},
      {{"max_grad_norm"},
       RULE(unless(s.c.optim.opt_enable_grad_global_norm_clipping || s.family.spec().reference.always_clips_by_norm,
                   "gradient clipping by norm is off (opt_enable_grad_global_norm_clipping=false)"))},
      {{"max_grad_value"},
       unless_set("opt_enable_grad_clipping", "gradient clipping by value is off (opt_enable_grad_clipping=false)")},
      {{"lr_num_cycles"},
       RULE(unless(s.c.optim.lr_scheduler == "cosine_with_restarts" || s.c.optim.lr_scheduler == "warmup_stable_decay",
                   "only lr_scheduler=cosine_with_restarts and warmup_stable_decay read it"))},
      {{"lr_power"}, RULE(unless(s.c.optim.lr_scheduler == "polynomial", "only lr_scheduler=polynomial reads it"))},
      {{"lr_decay_steps"},
       RULE(unless(s.c.optim.lr_scheduler == "warmup_stable_decay", "only lr_scheduler=warmup_stable_decay reads it"))},
      {{"lr_scheduler_min_lr_ratio"},
       RULE(unless(s.c.optim.lr_scheduler == "cosine" || s.c.optim.lr_scheduler == "rex" ||
                       s.c.optim.lr_scheduler == "warmup_stable_decay",
                   "only lr_scheduler=cosine, rex and warmup_stable_decay read it"))},
      {{"warmup_steps_fraction"},
       RULE(unless(s.c.optim.lr_warmup_steps < 0, "lr_warmup_steps says how long warming up takes"))},
      {{"loraplus_lr_ratio"}, unless_set("train_lora", "there are no LoRA matrices (train_lora=false)")},
      {{"learning_rate"}, RULE(unless(!s.c.update.unet_lr, "unet_lr says the denoiser's"))},
      {{"learning_rate", "unet_lr", "text_encoder_learning_rate"},
       RULE(unless(!make_optimizer(s.c.optim)->has_own_rate(), "relative_step=True finds its own step sizes"))},
      {{"warmup_steps_fraction", "lr_warmup_steps", "learning_rate_schedule_steps"},
       RULE(unless(s.c.optim.lr_scheduler != "constant", "lr_scheduler=constant is the same at every step"))},
      {{"low_precision_update"},
       RULE(unless(parse_dtype(s.c.layers.weights_dtype) != DType::f32, "weights_dtype=float32 rounds no update"))},
      {{"moments_dtype"},
       RULE(unless(has_moments_of_parameters(*make_optimizer(s.c.optim)),
                   "this optimizer has no float32 moments of the weights' shapes"))},
      {{"text_encoder_learning_rate"},
       unless_set("train_text_encoder", "no text encoder is trained (train_text_encoder=false)")},
      {{"num_train_epochs"}, RULE(unless(s.c.optim.max_train_steps <= 0, "max_train_steps says when training ends"))},
      {of<AutoencoderKeys>(), unless_set("train_new_vae", "no autoencoder is trained (train_new_vae=false)")},
      {{"vae_image_pretrain_steps"}, RULE(unless(s.videos(), "this model's media are images"))},
      {{"lora_rank", "lora_alpha", "lora_target_modules", "adapter", "use_rslora", "rank_pattern", "alpha_pattern",
        "conv_dim", "conv_alpha", "lora_dropout", "rank_dropout", "module_dropout", "decompose_factor",
        "decompose_both", "feedforward_modules"},
       unless_set("train_lora", "no LoRA is trained (train_lora=false)")},
      {{"lora_rank", "lora_alpha"},
       RULE(unless(adapter_named(s.c.lora.adapter).has_rank(), "this kind of adapter has no rank"))},
      {{"loraplus_lr_ratio"},
       RULE(unless(s.c.lora.adapter == "lora" || s.c.lora.adapter == "dora", "this kind of adapter has no matrix B"))},
      {{"disable_training_weights", "train_flow_shift", "timestep_lookup"},
       RULE(unless(s.is_flow_matching(), "this is not a flow-matching model"))},
      {{"logit_mean", "logit_std", "mode_scale", "sigmoid_scale", "train_flow_shift"},
       [](const Situation& s, const std::string& key) {
         const std::string& sampling = s.c.process.timestep_sampling;
         return timestep_sampling_reads(sampling, key) ? ""
                                                       : fmt::format("timestep_sampling={} does not read it", sampling);
       }},
      {{"huber_c", "huber_schedule"},
       RULE(unless(s.c.denoise.loss_type == "huber" || s.c.denoise.loss_type == "smooth_l1",
                   "only loss_type=huber and smooth_l1 read it"))},
      {{"huber_scale"},
       RULE(unless((s.c.denoise.loss_type == "huber" || s.c.denoise.loss_type == "smooth_l1") &&
                       s.c.denoise.huber_schedule != "snr",
                   "only loss_type=huber and smooth_l1 with huber_schedule=constant or exponential read it"))},
      {{"cfm_lambda"}, unless_set("contrastive_flow_matching", "contrastive_flow_matching is false")},
      {{"multires_noise_discount"},
       RULE(unless(s.c.denoise.multires_noise_iterations > 0, "only multires_noise_iterations reads it"))},

      // Data.
      {{"dataset_config", "hf_train_files", "grain_train_files", "train_data_dir", "hf_data_dir", "dataset_name"},
       RULE(s.reads_data_of(key) ? "" : s.data_key() + " says where the data is"),
       true},
      {{"dataset_type"},
       RULE(unless(!s.is_dreambooth() && s.c.denoise.replay_batches.empty(), "the data is elsewhere"))},
      {{"cache_dreambooth_dataset"}, always("latents of DreamBooth's images are always cached")},
      {{"center_crop", "image_column", "caption_column", "train_split", "original_size_conditioning", "masked_loss"},
       if_set("dataset_config", "its folders keep aspect ratios, captions, masks and sizes in their own way")},
      {{"prior_loss_weight"},
       RULE(unless(s.keys.changed("instance_data_dir") || s.keys.changed("dataset_config"),
                   "there are no regularization images (instance_data_dir and dataset_config are empty)"))},
      {of<InversionKeys>() - Keys{"placeholder_token"},
       unless_set("placeholder_token", "the run is not textual inversion (placeholder_token is empty)")},
      {{"repeats"},
       RULE(unless(s.c.inversion.learnable_property != "captions", "learnable_property=captions has no templates"))},
      {of<DreamboothKeys>() - Keys{"instance_data_dir", "prior_loss_weight"},
       unless_set("instance_data_dir", "the run is not DreamBooth (instance_data_dir is empty)")},
      {of<SyntheticKeys>() + Keys{"synthetic_num_samples"},
       RULE(unless(s.c.source.dataset_type == "synthetic", "dataset_type is not synthetic"))},
      {of<SyntheticKeys>(), if_set("cache_latents_text_encoder_outputs", "images are generated, not encoded samples")},
      {{"synthetic_override_num_frames", "synthetic_override_vae_scale_factor_temporal"},
       RULE(unless(s.videos(), "this model's media are images"))},
      {{"load_tfrecord_cached"},
       RULE(unless(s.c.source.dataset_type == "tfrecord" || s.c.source.dataset_type == "grain",
                   "dataset_type is neither tfrecord nor grain"))},
      {{"min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale"},
       unless_set("enable_bucket", "there are no buckets (enable_bucket=false)")},
      {{"center_crop"},
       RULE(unless(!s.c.images.enable_bucket && !s.videos(),
                   "clips, and images in buckets, are always cut around their centre"))},
      {of<EvalKeys>() - Keys{"eval_every"},
       RULE(unless(s.c.eval.eval_every > 0 || !s.trains(), "nothing is evaluated (eval_every=-1)"))},
      {{"num_eval_samples"},
       unless_set("enable_eval_timesteps", "enable_eval_timesteps=false: all samples are written")},
      {{"timesteps_list"},
       RULE(unless(s.trains() || s.c.tfrecords.enable_eval_timesteps, "enable_eval_timesteps=false"))},
      {{"per_device_batch_size"}, if_set("global_batch_size", "global_batch_size is given"), true},
      {{"resolution"},
       RULE(unless((!s.videos() && !s.generates()) || !s.c.sample.height || !s.c.sample.width,
                   "height and width are given")),
       true},

      // Outputs.
      {{"sample_every"}, unless_set("prompt", "there is nothing to sample (prompt is empty)")},
      {{"metrics_file", "gcs_metrics"}, if_set("write_metrics", "write_metrics=false")},
      {{"timing_metrics_file"}, if_set("write_timing_metrics", "write_timing_metrics=false")},
      {{"write_timing_metrics"}, unless_set("timing_metrics_file", "timing_metrics_file is empty"), true},
      {{"skip_first_n_steps_for_profiler", "profiler_steps"},
       unless_set("enable_profiler", "nothing is profiled (enable_profiler=false)"),
       true},
      {{"enable_profiler"},
       RULE(unless(!s.trains() || s.c.optim.max_train_steps <= 0 ||
                       s.c.optim.max_train_steps > s.c.profile.skip_first_n_steps_for_profiler,
                   "the run ends before its profile begins (skip_first_n_steps_for_profiler)"))},
      {{"fps"},
       RULE(unless(!s.generates() || s.c.sample.output_type.empty() || s.c.sample.output_type == "mp4",
                   "only output_type=mp4 reads it")),
       true},

      // Devices.
      {{"dcn_data_parallelism", "dcn_fsdp_parallelism", "dcn_fsdp_batch_parallelism", "dcn_context_parallelism",
        "dcn_tensor_parallelism"},
       RULE(unless(s.slices() > 1 || s.size(key) <= 1, "there is one slice"))},
      {{"allow_split_physical_axes"}, RULE(unless(s.devices.platform() == Platform::tpu, "only TPUs form a torus"))},
      {{"logical_axis_rules", "data_sharding", "replicate_vae"},
       RULE(unless(s.mesh.devices() > 1, "there is one device")),
       true},
      {{"attention_sharding_uniform"},
       RULE(unless(s.mesh.size("context") > 1, "no devices share sequences (ici_context_parallelism=1)")),
       true},
      {{"enable_single_replica_ckpt_restoring"}, RULE(unless(!processes().alone(), "there is one process")), true},

      // Models and layers.
      {{"revision"},
       RULE(unless(!std::filesystem::exists(s.c.model.pretrained_model_name_or_path),
                   "pretrained_model_name_or_path is a path, not a name in the Hugging Face cache"))},
      {{"lightning_ckpt"}, unless_set("lightning_repo", "lightning_repo is empty")},
      {starting_with("train_new_", of<ModelKeys>()) + Keys{"random_text_encoder"},
       RULE(unless(s.trains(), "weights that are there are taken")), true},
      {{"scan_layers"}, RULE(unless(s.repeats(), "no layers of this model repeat"))},
      {{"blocks_to_swap"}, RULE(unless(s.devices.platform() != Platform::cpu, "a CPU's memory is the host's"))},
      {{"max_sequence_length"}, RULE(unless(s.reads_length(), "this model has a fixed caption length"))},
      {{"reference_resolution"}, RULE(unless(s.family.reference_images(), "this model takes no reference images"))},
      {{"text_encoder_out_layers"}, RULE(unless(s.reads_layers(), "this model reads one layer of its text encoder"))},
      {of<QuantizationKeys>() - Keys{"use_qwix_quantization", "quantization", "quantization_local_shard_count"},
       unless_set("use_qwix_quantization", "nothing is quantized (use_qwix_quantization=false)")},
      {{"base_quantization_skip"},
       unless_set("base_weights_dtype", "no weights are in few bits (base_weights_dtype is empty)")},
      {{"names_which_can_be_saved", "names_which_can_be_offloaded"},
       RULE(unless(s.c.layers.remat_policy == "CUSTOM", "only remat_policy=CUSTOM reads it"))},
      {{"flash_min_seq_length", "flash_block_sizes"},
       unless_set("attention", "attention=dot_product has no blocks"),
       true},
      {{"attention", "flash_min_seq_length", "flash_block_sizes"},
       RULE(unless(s.devices.platform() != Platform::cpu || (key == "attention" && s.mesh.size("context") > 1),
                   "a CPU has one kernel, which stores no logits")),
       true},
      {{"enable_tile_search"},
       RULE(unless(s.devices.platform() == Platform::tpu, "only kernels of TPUs have block sizes to choose")),
       true},
      {starting_with("tile_search_", of<LayerKeys>()), unless_set("enable_tile_search", "enable_tile_search=false"),
       true},
      {{"clip_bpe_file"}, RULE(unless(!s.has_tokenizer(), "the model folder has a tokenizer of its own"))},
      {{"vae_encode_chunk", "vae_decode_chunk", "num_frames", "fps"},
       RULE(unless(s.videos(), "this model's media are images"))},

      // Samples.
      {{"vae_encode_chunk"},
       RULE(unless(!s.generates() || !s.c.sample.image.empty() || !s.c.sample.image_url.empty(), "no image is given"))},
      {{"wildcards_dir"}, unless_set("dynamic_prompts", "dynamic_prompts=false")},
      {{"ip_adapter_image", "ip_adapter_scale", "ip_adapter_image_encoder"},
       unless_set("ip_adapter", "ip_adapter is empty")},
      {{"t2i_adapter_image", "t2i_adapter_conditioning_scale"},
       RULE(unless(!s.c.adapters.t2i_adapter.empty() || !s.family.spec().image_adapters.empty(),
                   "t2i_adapter is empty"))},
      {{"embedding_tokens"}, unless_set("embeddings", "embeddings is empty")},
      {{"mask_grow", "mask_blur"},
       RULE(unless(!s.c.sample.mask_image.empty() || !s.c.sample.outpaint.empty(), "there is no mask_image"))},
      {{"preview_autoencoder"}, unless_set("preview_every", "there are no previews (preview_every=0)")},
      {{"upscaler"},
       RULE(
           unless(s.c.sample.hires_scale > 1 || s.c.sample.upscale > 1, "nothing is enlarged (hires_scale, upscale)"))},
      {{"upscaler_tile"}, unless_set("upscaler", "upscaler is empty")},
      {{"denoising_start"}, RULE(unless(s.begins_with_image(), "samples start from pure noise"))},
      {{"strength"}, if_set("denoising_start", "denoising_start says where the steps begin")},
      {{"aesthetic_score", "negative_aesthetic_score"},
       RULE(unless(!s.c.added_models.refiner.empty() || (!s.family.spec().size_conditioning.empty() &&
                                                         s.family.spec().size_conditioning[0].shape.dims[0] == 5),
                   "only a refiner reads aesthetic scores"))},
      {{"negative_aesthetic_score"}, RULE(unless(s.guides(), s.why_unguided()))},
      {{"hires_strength", "hires_upscaler"},
       RULE(unless(s.c.sample.hires_scale > 1, "hires_scale=1 generates nothing again"))},
      {{"strength"}, RULE(unless(s.begins_with_image(), "samples start from pure noise"))},
      {{"original_size", "crops_coords_top_left", "target_size"},
       RULE(unless(!s.family.spec().size_conditioning.empty(), "this model is not conditioned on sizes"))},
      {{"negative_prompt", "negative_prompt_2", "guidance_rescale", "cfg_normalization", "cfg_truncation"},
       RULE(unless(s.guides(), s.why_unguided()))},
      {{"guidance_scale", "do_classifier_free_guidance"},
       RULE(unless(!s.family.spec().unguided_only || s.c.sample.guidance_scale <= 1,
                   "this model was distilled to sample without guidance")),
       true},
      {{"magcache_thresh", "magcache_K", "retention_ratio", "mag_ratios_base", "mag_ratios_base_720p",
        "mag_ratios_base_480p"},
       unless_set("use_magcache", "use_magcache=false")},
      {{"first_block_cache_threshold"}, unless_set("use_first_block_cache", "use_first_block_cache=false")},
      {{"teacache_thresh", "teacache_coefficients"}, unless_set("use_teacache", "use_teacache=false")},
      {{"deepcache_interval", "deepcache_branch"}, unless_set("use_deepcache", "use_deepcache=false")},
      {{"mag_ratios_base_720p", "mag_ratios_base_480p"}, if_set("mag_ratios_base", "mag_ratios_base is given")},
      {{"mag_ratios_base_720p"}, RULE(unless(s.height() >= 720, "the height is below 720"))},
      {{"mag_ratios_base_480p"}, RULE(unless(s.height() < 720, "the height is 720 or more"))},
      {{"use_batched_text_encoder"}, always("prompts are always encoded together")},
      {{"enable_lora"}, unless_set("lora_config", "lora_config is empty"), true},
      {{"sample_seed"}, if_set("latents", "latents are given")},
      {{"image_url"}, if_set("image", "image is given")},
      {{"controlnet_conditioning_scale"},
       unless_set("controlnet_model_name_or_path", "controlnet_model_name_or_path is empty"),
       true},
      {of<ControlKeys>() - Keys{"controlnet_model_name_or_path", "controlnet_conditioning_scale"},
       unless_set("controlnet_model_name_or_path", "controlnet_model_name_or_path is empty")},
      {{"vae_slicing", "per_device_batch_size", "global_batch_size"},
       RULE(unless(!s.generates() || s.c.sample.num_images_per_prompt.value_or(2) * std::ssize(s.c.sample.prompt) > 1,
                   "there is one sample")),
       true},
      {{"scan_diffusion_loop"},
       RULE(unless(s.c.sample.preview_every == 0 && s.c.step_cache.step_cache().empty(),
                   "previews and caches between steps need one step at a time"))},
      {{"use_kv_cache"},
       RULE(unless(!s.c.sample.scan_diffusion_loop || !s.c.step_cache.step_cache().empty(),
                   "all steps are one program"))},
      {{"flow_shift"}, RULE(unless(s.is_flow_matching(), "this is not a flow-matching model"))},
      {{"time_shift", "base_shift", "max_shift"}, if_set("flow_shift", "flow_shift replaces it")},
      {{"base_shift", "max_shift"},
       RULE(unless(!s.family.spec().log_shift, "the shift of this model follows from the numbers of tokens and steps")),
       true},
      {{"base_shift", "max_shift"},
       RULE(unless(!s.is_flow_matching() || s.shifts_by_size(),
                   "the shift does not depend on the size (time_shift=false)"))},
      {{"vae_tiling"}, RULE(unless(s.tiles(), "the samples are not larger than a tile of the decoder"))},
  };
  return all;
}

#undef RULE

/// Ignored keys by reason.
using Ignored = std::vector<std::pair<std::string, Keys>>;

void add(Ignored& all, const std::string& reason, const std::string& key) {
  const auto same = std::ranges::find(all, reason, [](const auto& i) { return i.first; });
  (same == all.end() ? all.emplace_back(reason, Keys{}) : *same).second.push_back(key);
}

std::vector<std::string> texts_of(const Ignored& all) {
  std::vector<std::string> out;
  for (const auto& [reason, keys] : all)
    out.push_back(fmt::format("{} {} ignored: {}", fmt::join(keys, ", "), keys.size() == 1 ? "is" : "are", reason));
  return out;
}

void log_each(LogLevel level, const Ignored& all) {
  for (const std::string& text : texts_of(all)) log_line(level, text);
}

/// The config with a request's values.
RunConfig with_request(RunConfig c, const SampleRequest& r, const std::set<std::string>& set_keys) {
  static_cast<SampleKeys&>(c.sample) = r;
  c.sample.image.assign(r.images.size(), "image");
  c.sample.image_url.clear(), c.sample.mask_image = r.mask ? "mask" : "";
  c.scheduler = r.scheduler;
  c.on_command_line = set_keys;
  return c;
}

}  // namespace

std::vector<std::string> KeyRules::ignored_in(const SampleRequest& request, const std::set<std::string>& set_keys,
                                              const OpenedModels& opened) const {
  const RunConfig c = with_request(*config_, request, set_keys);
  const Situation s{c, opened.folder, opened.family, opened.devices, opened.samples, "generate"};
  Ignored ignored;
  Keys named;
  for (const IgnoredRule& rule : rules())
    for (const std::string& key : rule.keys) {
      if (!set_keys.contains(key) || std::ranges::count(named, key) > 0 || (rule.shared && !s.keys.changed(key)))
        continue;
      const std::string reason = rule.reason(s, key);
      if (reason.empty()) continue;
      named.push_back(key);
      add(ignored, reason, key);
    }
  return texts_of(ignored);
}

void KeyRules::warn_of_ignored(const OpenedModels& opened, std::string_view command) const {
  const Situation s{*config_, opened.folder, opened.family, opened.devices, opened.samples, command};
  Ignored of_words, of_file;
  Keys named, named_of_file;
  for (const IgnoredRule& rule : rules())
    for (const std::string& key : rule.keys) {
      const bool on_command_line = s.c.on_command_line.contains(key), differs = s.keys.changed(key);
      if (std::ranges::count(named, key) > 0 ||
          !(rule.shared ? on_command_line && differs : on_command_line || differs))
        continue;
      const std::string reason = rule.reason(s, key);
      if (reason.empty()) continue;
      named.push_back(key);
      add(on_command_line ? of_words : of_file, reason, key);
      if (!on_command_line) named_of_file.push_back(key);
    }
  log_each(LogLevel::warning, of_words);
  constexpr size_t kLines = 5;  // a file for several commands, models and machines may have many
  const bool many = of_file.size() > kLines;
  if (many)
    log_warning("{} keys of {} are ignored in this run: {} (MAXDIFFUSION_LOG=debug prints why)", named_of_file.size(),
                s.c.file.empty() ? "the config" : s.c.file, fmt::join(named_of_file, ", "));
  log_each(many ? LogLevel::debug : LogLevel::warning, of_file);
}

}  // namespace md
