#include "maxdiffusion/run/train_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/settings/compatibility.h"

namespace md {
namespace {

/// The only denoiser, or those that train_expert names.
std::vector<std::string> trained_denoisers(const std::string& expert, const Family& family) {
  std::vector<std::string> all = family.spec().denoisers;
  if (all.size() != 2) {
    check(expert.empty(), Code::invalid_config, "train_expert is '{}', but this model has one denoiser", expert);
    return all;
  }
  check(!expert.empty(), Code::invalid_config,
        "train_expert is ''; this model has two denoisers: expected high, low or both");
  if (expert == "both") return all;
  return {all[expert == "high" ? 0 : 1]};
}

DenoiseTask plan_task(const RunConfig& c, const ModelFolder& folder, const std::shared_ptr<const Family>& family,
                      DataMode mode, const DeviceCounts& counts) {
  DenoiseTask t;
  t.family = family;
  t.process = make_process(training_config(folder.scheduler_config(), c.scheduler), c.process);
  t.images = family->required_images() > 0;
  t.noise = drawn_noise_input(c.denoise.noise_offset, c.denoise.input_perturbation);
  if (mode == DataMode::images) t.media = pixels_input();
  if (mode == DataMode::images || c.denoise.train_text_encoder) t.text = tokens_input();
  t.batch_size = part_of_replica(global_batch(c.batches, counts.devices), counts.replicas);
  t.size = training_size(c.sample, c.images.resolution, *family);
  t.conditioning_size = t.size;
  t.guidance = c.sample.guidance_scale;
  if (mode == DataMode::dreambooth) {
    t.prior_loss_weight = c.dreambooth.prior_loss_weight;
  } else {
    t.caption_dropout = c.denoise.caption_dropout;
    t.masked = c.denoise.masked_loss || c.images.alpha_mask;
    t.sizes = c.images.enable_bucket || c.images.original_size_conditioning;
  }
  if (mode == DataMode::replay) {
    t.media = latents_input();
    t.noise = recorded_noise_input();
    t.sizes = true;
  }
  return t;
}

/// Peak rates for the samples of an update.
void set_rates(TrainPlan& plan) {
  StepOptions& s = plan.loop.step;
  s.optim.learning_rate = scaled_rate(plan.optim, plan.optim.learning_rate, plan.update_size());
  for (const std::string& encoder : plan.task.family->spec().text_components())
    s.learning_rates[encoder] = scaled_rate(plan.optim, plan.text_encoder_rate, plan.update_size());
}

StepOptions plan_step(const RunConfig& c, const TrainPlan& plan) {
  const std::shared_ptr<const Family> family = plan.task.family;
  StepOptions s;
  s.scope = scope_options(c.layers);
  s.optim = plan.optim;
  s.accumulation = c.update.gradient_accumulation_steps;
  s.ema_decay = c.update.ema_decay;
  s.per_model_step_count = plan.denoisers.size() > 1;
  std::vector<std::string> trained = plan.denoisers;
  if (plan.trains_text_encoders)
    for (const std::string& encoder : family->spec().text_components()) trained.push_back(encoder);
  s.variation = [family, trained, encoders = c.encoders, lora = c.lora](const std::string& component,
                                                                        const Scope& scope) {
    ScopeOptions options = scope.options();
    if (std::ranges::count(trained, component) == 0)
      return scope
          .with(component == family->spec().autoencoder->component ? autoencoder_options(options, encoders)
                                                                   : text_encoder_options(options, encoders))
          .frozen();
    if (std::ranges::count(family->spec().denoisers, component) == 0) options.quantization = nullptr;
    return lora.train_lora
               ? lora_scope(scope.with(options), training_lora(lora, family->spec().lora_targets(component)))
               : scope.with(options);
  };
  return s;
}

LoopOptions plan_loop(const RunConfig& c, const RunInfo& run) {
  const char* libtpu = std::getenv("LIBTPU_INIT_ARGS");  // read by the plugin itself
  LoopOptions o;
  o.folder = run.folder;
  o.place = run.place;
  o.seed = run.seed;
  o.keys = c.loop;
  o.metrics = run.metrics;
  o.profile = run.profile;
  o.compile = c.compile;
  o.run_name = run.name;
  o.texts = {{"config", "```yaml\n" + run.config_yaml + "```"}, {"libtpu_init_args", libtpu ? libtpu : ""}};
  return o;
}

AutoencoderPlan plan_autoencoder(const RunConfig& c, const DenoiseTask& task, const DeviceCounts& counts) {
  AutoencoderPlan plan{.steps = c.vae.vae_max_train_steps,
                       .image_steps = c.vae.vae_image_steps,
                       .optim = c.optim.with_switches(true),
                       .scope = scope_options(c.layers)};
  plan.task.family = task.family;
  plan.task.batch_size = part_of_replica(
      global_batch(c.vae.vae_per_device_batch_size, counts.devices, "vae_per_device_batch_size"), counts.replicas);
  plan.task.size = task.size;
  plan.task.kl_weight = c.vae.vae_kl_weight;
  plan.optim.learning_rate = c.vae.vae_learning_rate;
  plan.optim.learning_rate_schedule_steps = -1;
  plan.scope.quantization = nullptr;
  plan.scope.dropout = 0;  // of the denoiser
  check(plan.image_steps <= 0 || task.family->spec().videos(), Code::invalid_config,
        "vae_image_steps is {}, but this model's media are images; set it to 0", plan.image_steps);
  return plan;
}

/// Of those keys that have a like. Source: kohya-ss sd-scripts, train_network.py.
std::map<std::string, std::string> kohya_metadata(const RunConfig& c, const RunInfo& run, const Family& family) {
  auto number = [](auto v) { return fmt::format("{}", v); };
  const std::string none = "None";  // as Python writes it
  const MediaSize size = training_size(c.sample, c.images.resolution, family);
  const auto warmup = c.optim.warmup_steps_fraction * static_cast<double>(c.optim.max_train_steps);
  return {
      {"ss_sd_model_name", std::filesystem::path(c.model.pretrained_model_name_or_path).filename().string()},
      {"ss_output_name", run.name},
      {"ss_learning_rate", number(c.optim.learning_rate)},
      {"ss_unet_lr", number(c.optim.learning_rate)},
      {"ss_text_encoder_lr", c.denoise.train_text_encoder ? number(c.update.text_encoder_learning_rate) : none},
      {"ss_max_train_steps", number(c.optim.max_train_steps)},
      {"ss_lr_scheduler", c.optim.lr_scheduler},
      {"ss_lr_warmup_steps", number(static_cast<int64_t>(warmup))},
      {"ss_optimizer", make_optimizer(c.optim)->full_name()},
      {"ss_max_grad_norm", number(c.optim.max_grad_norm)},
      {"ss_gradient_accumulation_steps", number(c.update.gradient_accumulation_steps)},
      {"ss_batch_size_per_device", number(c.batches.per_device_batch_size)},
      {"ss_resolution", fmt::format("({}, {})", size.width, size.height)},
      {"ss_enable_bucket", c.images.enable_bucket ? "True" : "False"},
      {"ss_mixed_precision", c.layers.activations_dtype == "bfloat16" ? "bf16" : "no"},
      {"ss_seed", number(run.seed)},
      {"ss_noise_offset", c.denoise.noise_offset != 0 ? number(c.denoise.noise_offset) : none},
      {"ss_min_snr_gamma", c.process.snr_gamma > 0 ? number(c.process.snr_gamma) : none},
      {"ss_caption_dropout_rate", number(c.denoise.caption_dropout)},
  };
}

LoraPlan plan_lora(const RunConfig& c, const RunInfo& run, const Family& family) {
  LoraPlan lora{.config = training_lora(c.lora, family.spec().lora_targets(family.spec().denoiser())),
                .init = c.lora.lora_init,
                .metadata = kohya_metadata(c, run, family)};
  lora.targets = lora.config.targets;
  if (c.denoise.train_text_encoder && c.lora.lora_target_modules.empty())
    for (const std::string& more : family.spec().lora_targets(family.spec().text_components().at(0)))
      lora.targets.push_back(more);
  return lora;
}

EvalPlan plan_evaluation(const RunConfig& c, const TrainPlan& plan) {
  const Family& family = *plan.task.family;
  const bool records = plan.data.mode == DataMode::encoded_records;
  EvalPlan eval{.keys = c.eval,
                .source = {.dataset_type = records ? c.source.dataset_type : "",
                           .train_data_dir = c.eval.eval_data_dir,
                           .train_split = c.source.train_split,
                           .image_column = c.source.image_column,
                           .caption_column = c.source.caption_column}};
  if (records || plan.data.mode == DataMode::synthetic_latents) {
    eval.source.array_columns = family.spec().records->columns(family.spec());
    return eval;
  }
  eval.source.max_train_samples = c.eval.eval_max_number_of_samples_in_bucket;
  eval.images = {.resolution = c.images.resolution, .center_crop = c.images.center_crop || c.images.random_crop};
  if (!family.spec().videos()) return eval;
  eval.images = plan_images(c, family);
  eval.images.random_flip = false;
  eval.images.buckets = AspectBuckets::of({{plan.task.size.height, plan.task.size.width, plan.task.size.frames}});
  return eval;
}

/// None: nothing, or not by this process.
std::optional<SamplePlan> plan_samples(const RunConfig& c, const RunInfo& run) {
  if (c.sample.prompt.empty() || !run.is_coordinator || !run.has_all_weights) return std::nullopt;
  if (c.run.sample_every == 0 && !c.run.enable_ssim && !c.run.enable_generate_video_for_eval) return std::nullopt;
  return SamplePlan{c.run.sample_every, c.run.enable_generate_video_for_eval, c.run.enable_ssim,
                    sampling_request(c, run)};
}

/// What processes whose devices are one mesh cannot do yet: none has the trained weights whole.
void check_joint_devices(const RunConfig& c) {
  const auto refuse = [](bool set, const char* key) {
    check(!set, Code::invalid_config,
          "{}: not yet by several processes with GPUs or TPUs, of which none has all weights", key);
  };
  refuse(c.model.train_new_vae, "train_new_vae");
  refuse(c.lora.train_lora, "train_lora");
  refuse(!c.dreambooth.instance_data_dir.empty(), "instance_data_dir");
  if (plan_samples(c, {}))
    log_warning(
        "prompt has no effect while processes with GPUs or TPUs train: convert makes a checkpoint a model folder, "
        "which generate draws with");
}

}  // namespace

PlanParts plan_parts(const RunConfig& c, const RunInfo& run, const ModelFolder& folder,
                     const std::shared_ptr<const Family>& family, const DeviceCounts& counts) {
  return {{"keys",
           [&c, &run, family](TrainPlan&) {
             if (!run.has_all_weights) check_joint_devices(c);
             check_training_keys(c, *family);
             check(c.update.gradient_accumulation_steps >= 1, Code::invalid_config,
                   "gradient_accumulation_steps is {}; expected 1 or more", c.update.gradient_accumulation_steps);
           }},
          {"keys",
           [&c, &run, &folder, family, counts](TrainPlan& plan) {
             plan.run = run;
             plan.data.mode = data_mode(c, *family);
             plan.denoisers = trained_denoisers(c.model.train_expert, *family);
             plan.trains_text_encoders = c.denoise.train_text_encoder;
             plan.boundary_ratio = c.sample.boundary_ratio;
             plan.replicas = counts.replicas;
             plan.optim = c.optim.with_switches(family->spec().reference.always_clips_by_norm);
             plan.text_encoder_rate = c.update.text_encoder_learning_rate;
             plan.task = plan_task(c, folder, family, plan.data.mode, counts);
             plan.loop = plan_loop(c, run);
             plan.loop.title = plan.denoisers.size() == 1 ? "train " + plan.denoisers[0] : "train";
             plan.loop.step = plan_step(c, plan);
             set_rates(plan);
             plan.tasks = tasks_per_expert(plan);
             if (c.lora.train_lora) plan.lora = plan_lora(c, run, *family);
             if (c.model.train_new_vae && plan.data.mode == DataMode::cached_latents)
               plan.autoencoder = plan_autoencoder(c, plan.task, counts);
             plan.samples = plan_samples(c, run);
           }},
          {"sizes",
           [&c, &run, family](TrainPlan& plan) {
             plan.data = plan_data(c, run, *family);
             if (plan.data.mode != DataMode::synthetic_latents) return;
             plan_synthetic(c, run, plan.task, plan.data.source.config);
             plan.tasks = tasks_per_expert(plan);
           }},
          {"evaluation", [&c](TrainPlan& plan) {
             if (c.eval.eval_every > 0) plan.eval = plan_evaluation(c, plan);
           }}};
}

TrainPlan plan_training(const RunConfig& config, const RunInfo& run, const ModelFolder& folder,
                        const std::shared_ptr<const Family>& family, const DeviceCounts& counts) {
  TrainPlan plan;
  for (const auto& [name, part] : plan_parts(config, run, folder, family, counts)) part(plan);
  return plan;
}

TrainPlan plan_training(const RunConfig& config, const RunInfo& run, const ModelComponents& models) {
  models.denoiser_options();
  return plan_training(config, run, models.folder(), models.family(), models.device_counts());
}

TrainPlan with_data(TrainPlan plan, const DenoiseTask& task, const std::vector<ImageSize>& buckets, int64_t samples) {
  plan.task = task;
  plan.tasks.clear();
  for (const DenoiseTask& expert : tasks_per_expert(plan)) {
    if (buckets.empty()) plan.tasks.push_back(expert);
    for (const ImageSize& size : buckets) {
      DenoiseTask& t = plan.tasks.emplace_back(expert);
      t.size = {size.height, size.width, size.frames};
      t.one_of_several = buckets.size() > 1;
    }
  }
  set_rates(plan);
  // DreamBooth's few pictures come again and again; of others a batch holds none twice.
  check(plan.data.mode == DataMode::dreambooth || samples <= 0 || plan.batch_size() <= samples, Code::invalid_config,
        "a batch is of {} samples, but the data holds {}; give a smaller per_device_batch_size", plan.batch_size(),
        samples);
  if (plan.optim.max_train_steps > 0) return plan;
  const int64_t epochs = plan.loop.keys.num_train_epochs;
  check(epochs > 0, Code::invalid_config, "You must set max_train_steps or num_train_epochs to a positive integer");
  check(samples > 0, Code::invalid_config,
        "max_train_steps is {}, and the number of samples is not known before they are read; give max_train_steps",
        plan.optim.max_train_steps);
  plan.loop.step.optim.max_train_steps = std::max<int64_t>(1, epochs * samples / plan.update_size());
  return plan;
}

bool TrainPlan::trains(const std::string& component) const {
  return std::ranges::count(denoisers, component) > 0 ||
         (trains_text_encoders && std::ranges::count(task.family->spec().text_components(), component) > 0);
}

std::vector<DenoiseTask> tasks_per_expert(const TrainPlan& plan) {
  const DenoiseTask& task = plan.task;
  const std::vector<std::string> all = task.family->spec().denoisers;
  if (all.size() == 1) return {task};
  const auto end = static_cast<double>(task.process->num_train_timesteps());
  const double boundary = plan.boundary_ratio.value_or(*task.family->spec().boundary_ratio) * end;
  std::vector<DenoiseTask> tasks;
  for (const std::string& expert : plan.denoisers) {
    DenoiseTask& t = tasks.emplace_back(task);
    t.expert = expert;
    t.takes_turns = plan.denoisers.size() > 1;
    t.process =
        expert == all[0] ? task.process->restricted_to(boundary, end) : task.process->restricted_to(0, boundary);
  }
  return tasks;
}

std::vector<const Task*> pointers(const std::vector<DenoiseTask>& tasks) {
  std::vector<const Task*> all;
  for (const DenoiseTask& t : tasks) all.push_back(&t);
  return all;
}

std::string describe(const TrainPlan& plan) {
  std::string out;
  const auto add = [&](const char* name, const auto& value) { out += fmt::format("{}: {}\n", name, value); };
  const MediaSize& size = plan.task.size;
  const StepOptions& step = plan.loop.step;
  const std::vector<std::string> encoders = plan.task.family->spec().text_components();
  const DataSourceConfig& from = plan.data.source.config;
  add("folder", plan.run.place);
  add("checkpoints", plan.run.checkpoint_dir);
  add("seed", plan.run.seed);
  add("sample_seed", plan.run.sample_seed);
  add("data", name_of(plan.data.mode));
  add("source", plan.data.mode == DataMode::replay ? plan.data.replay
                : from.dataset_type == "synthetic" ? from.dataset_type
                                                   : from.hf_train_files + from.grain_train_files +
                                                         from.train_data_dir + from.hf_data_dir + from.dataset_name);
  if (plan.data.dreambooth) add("class_images", plan.data.dreambooth->class_data_dir);
  if (plan.data.dreambooth || plan.data.mode == DataMode::cached_latents) add("cache", plan.data.cache_dir);
  add("size",
      fmt::format("{}x{}{}", size.height, size.width, size.frames > 1 ? fmt::format(", {} frames", size.frames) : ""));
  if (plan.data.images.buckets) add("buckets", "as the sizes in the data need");
  add("batch", plan.batch_size());
  add("replicas", plan.replicas);
  add("accumulation", step.accumulation);
  add("update", plan.update_size());
  if (step.optim.max_train_steps > 0) add("steps", step.optim.max_train_steps);
  if (step.optim.max_train_steps <= 0) add("epochs", plan.loop.keys.num_train_epochs);
  add("trained", fmt::format("{}", fmt::join(plan.denoisers, ", ")));
  add("learning_rate", step.optim.learning_rate);
  if (plan.trains_text_encoders) {
    add("trained_text_encoders", fmt::format("{}", fmt::join(encoders, ", ")));
    add("text_encoder_learning_rate", step.learning_rates.at(encoders.front()));
  }
  if (step.ema_decay > 0) add("ema_decay", step.ema_decay);
  if (plan.lora)
    add("lora",
        fmt::format("rank {}, alpha {:g}, in {}{}", plan.lora->config.rank, plan.lora->config.alpha,
                    fmt::join(plan.lora->targets, ", "), plan.lora->init.empty() ? "" : "; from " + plan.lora->init));
  if (const auto& a = plan.autoencoder)
    add("autoencoder", fmt::format("{} steps on single frames, then {}, batch {}, learning rate {:g}", a->image_steps,
                                   a->steps, a->task.batch_size * plan.replicas, a->optim.learning_rate));
  if (const auto& e = plan.eval)
    add("evaluation", fmt::format("every {} steps, of {}, at {}", e->keys.eval_every, e->source.train_data_dir,
                                  fmt::join(e->keys.timesteps_list, ", ")));
  if (const auto& s = plan.samples) {
    add("samples_every", s->every);
    add("samples_after_evaluation", s->after_evaluation);
    add("samples_compared", s->compares);
  }
  return out;
}

double scaled_rate(const OptimConfig& optim, double rate, int64_t samples) {
  return optim.scale_lr ? rate * static_cast<double>(samples) : rate;
}

}  // namespace md
