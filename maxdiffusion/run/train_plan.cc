#include "maxdiffusion/run/train_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/nn/layers.h"

namespace md {
namespace {

/// The only denoiser, or those that train_expert selects.
std::vector<std::string> trained_denoisers(const std::string& expert, const Family& family) {
  std::vector<std::string> all = family.spec().denoisers;
  if (all.size() != 2) {
    check(expert.empty(), Code::invalid_config, "train_expert is '{}'; expected empty: this model has one denoiser",
          expert);
    return all;
  }
  check(!expert.empty(), Code::invalid_config,
        "train_expert is empty; expected high, low or both: this model has two denoisers");
  if (expert == "both") return all;
  return {all[expert == "high" ? 0 : 1]};
}

DenoiseTask plan_task(const DataKeys& d, const LearningKeys& l, const ModelFolder& folder,
                      const std::shared_ptr<const Family>& family, DataMode mode, const DeviceCounts& counts) {
  DenoiseTask t;
  t.family = family;
  const nlohmann::json noise_config = training_config(folder.scheduler_config(), l.scheduler);
  t.process = make_process(noise_config, l.process);
  t.images = family->required_images() > 0;
  t.references = std::ssize(d.source.reference_columns());
  const DenoiseKeys& k = d.denoise;
  t.noise = random_noise_input({.offset = k.noise_offset,
                                .perturbation = k.input_perturbation,
                                .multires = {k.multires_noise_iterations, k.multires_noise_discount}});
  t.distance = {k.loss_type, k.huber_c, k.huber_scale, k.huber_schedule};
  const bool has_threshold = k.loss_type == "huber" || k.loss_type == "smooth_l1";
  check(!has_threshold || k.huber_schedule != "snr" || t.process->has_signal_share(), Code::invalid_config,
        "huber_schedule is 'snr', but this model is trained by flow matching, without signal-to-noise ratios; expected "
        "constant or exponential");
  if (mode == DataMode::images) t.media = pixels_input();
  const bool inverts = !d.inversion.placeholder_token.empty();
  if (mode == DataMode::images || d.denoise.train_text_encoder || inverts) t.text = tokens_input();
  t.batch_size = part_of_replica(global_batch(d.batches, counts.devices), counts.replicas);
  t.size = training_size(d.sample, d.images.resolution, *family);
  t.conditioning_size = t.size;
  t.guidance = d.sample.guidance_scale;
  if (mode == DataMode::dreambooth) {
    t.prior_loss_weight = d.dreambooth.prior_loss_weight;
  } else {
    t.caption_dropout = d.denoise.caption_dropout;
    t.masked = d.denoise.masked_loss || d.images.alpha_mask;
    t.sizes = d.images.enable_bucket || d.images.original_size_conditioning;
  }
  if (mode == DataMode::replay) {
    t.media = latents_input();
    t.noise = recorded_noise_input();
    t.sizes = true;
  }
  if (k.contrastive_flow_matching) {
    const std::string predicted = noise_config.value("prediction_type", "epsilon");
    check(is_flow_matching(noise_config) || predicted == "v_prediction", Code::invalid_config,
          "contrastive_flow_matching is true, but this model predicts '{}'; expected a flow-matching model or "
          "v_prediction",
          predicted);
    t.contrast = k.cfm_lambda;
  }
  return t;
}

/// Throws invalid_config if the text is not a valid regular expression.
void check_expression(const char* key, const std::string& text) {
  try {
    std::regex(text, std::regex::ECMAScript);
  } catch (const std::regex_error& e) {
    fail(Code::invalid_config, "{} is '{}'; expected a regular expression: {}", key, text, e.what());
  }
}

/// Sets the peak learning rates, scaled by the samples of an update.
void set_rates(TrainPlan& plan) {
  StepOptions& s = plan.loop.step;
  s.optim.learning_rate = scaled_rate(plan.optim, plan.optim.learning_rate, plan.update_size());
  for (const std::string& encoder : plan.task.family->spec().text_components())
    s.learning_rates[encoder] =
        scaled_rate(plan.optim, plan.inversion ? plan.optim.learning_rate : plan.text_encoder_rate, plan.update_size());
  s.rates_by_name.clear();
  for (const auto& [expression, rate] : plan.rates_by_name)
    s.rates_by_name.emplace_back(expression, scaled_rate(plan.optim, rate, plan.update_size()));
}

/// Parses network_reg_lrs: expression and learning rate. Throws invalid_config for an invalid entry.
std::vector<std::pair<std::string, double>> rates_by_name(const std::vector<std::string>& words) {
  std::vector<std::pair<std::string, double>> out;
  for (const std::string& word : words) {
    const size_t sign = word.rfind('=');
    double rate = -1;
    if (sign != word.npos) std::from_chars(word.data() + sign + 1, word.data() + word.size(), rate);
    check(std::isfinite(rate) && rate >= 0, Code::invalid_config,
          "network_reg_lrs is '{}'; expected EXPRESSION=RATE, as in down_blocks.0=1e-5", word);
    out.emplace_back(word.substr(0, sign), rate);
    check_expression("network_reg_lrs", out.back().first);
  }
  return out;
}

/// The components of which any part is trained.
std::vector<std::string> trained_components(const TrainPlan& plan) {
  std::vector<std::string> all;
  if (!plan.inversion) all = plan.denoisers;
  if (plan.trains_text_encoders)
    for (const std::string& encoder : plan.task.family->spec().text_components()) all.push_back(encoder);
  return all;
}

StepOptions plan_step(const LearningKeys& l, const EncoderOptions& models, const TrainPlan& plan) {
  const std::shared_ptr<const Family> family = plan.task.family;
  StepOptions s;
  s.scope = scope_options(models.layers);
  s.optim = plan.optim;
  s.accumulation = l.update.gradient_accumulation_steps;
  s.ema_decay = l.update.ema_decay;
  s.loraplus_ratio = l.update.loraplus_lr_ratio;
  s.frozen = l.update.frozen_layers;
  for (const std::string& expression : s.frozen) check_expression("frozen_layers", expression);
  s.drops_adapters =
      l.lora.train_lora && (l.lora.lora_dropout > 0 || l.lora.rank_dropout > 0 || l.lora.module_dropout > 0);
  s.per_model_step_count = plan.denoisers.size() > 1;
  std::vector<std::string> trained;  // whole, or by LoRA
  for (const std::string& component : trained_components(plan))
    if (!plan.inversion) trained.push_back(component);
  s.change_scope = [family, trained, encoders = models.keys, lora = l.lora, inverts = plan.inversion.has_value()](
                       const std::string& component, const Scope& scope) {
    ScopeOptions options = scope.options();
    const bool denoises = std::ranges::count(family->spec().denoisers, component) > 0;
    if (std::ranges::count(trained, component) == 0) {
      if (component == family->spec().autoencoder->component)
        options = autoencoder_options(options, encoders);
      else if (!denoises)
        options = text_encoder_options(options, encoders);
      const Scope frozen = scope.with(options).frozen();
      return inverts && !denoises ? nn::with_added_rows_trained(frozen) : frozen;
    }
    if (!denoises) options.quantization = nullptr, options.few_bits = nullptr;
    return lora.train_lora
               ? lora_scope(scope.with(options), training_lora(lora, family->spec().lora_targets(component)))
               : scope.with(options);
  };
  return s;
}

LoopOptions plan_loop(const RunInfo& run, const LoopKeys& keys, const CompileConfig& compile) {
  const char* libtpu = std::getenv("LIBTPU_INIT_ARGS");  // read by the plugin itself
  LoopOptions o;
  o.folder = run.folder;
  o.place = run.place;
  o.seed = run.seed;
  o.keys = keys;
  o.metrics = run.metrics;
  o.profile = run.profile;
  o.compile = compile;
  o.run_name = run.name;
  o.texts = {{"config", "```yaml\n" + run.config_yaml + "```"}, {"libtpu_init_args", libtpu ? libtpu : ""}};
  return o;
}

AutoencoderPlan plan_autoencoder(const LearningKeys& l, const LayerKeys& layers, const DenoiseTask& task,
                                 const DeviceCounts& counts) {
  AutoencoderPlan plan{.steps = l.vae.vae_max_train_steps,
                       .image_steps = l.vae.vae_image_pretrain_steps,
                       .optim = l.optim.with_switches(true),
                       .scope = scope_options(layers)};
  plan.task.autoencoder = task.family->spec().autoencoder;
  plan.task.batch_size = part_of_replica(
      global_batch(l.vae.vae_per_device_batch_size, counts.devices, "vae_per_device_batch_size"), counts.replicas);
  plan.task.size = task.size;
  plan.task.kl_weight = l.vae.vae_kl_weight;
  plan.optim.learning_rate = l.vae.vae_learning_rate;
  plan.optim.learning_rate_schedule_steps = -1;
  plan.scope.quantization = nullptr;
  plan.scope.dropout = 0;  // the denoiser's dropout does not apply
  check(plan.image_steps <= 0 || task.family->spec().videos(), Code::invalid_config,
        "vae_image_pretrain_steps is {}; expected 0: this model generates images", plan.image_steps);
  return plan;
}

/// kohya's metadata for keys that have an equivalent there. Source: kohya-ss sd-scripts, train_network.py.
std::map<std::string, std::string> kohya_metadata(const TrainingRequest& r, const Family& family) {
  const auto& [d, l] = std::tie(r.data, r.learning);
  auto number = [](auto v) { return fmt::format("{}", v); };
  const std::string none = "None";  // Python's None
  const MediaSize size = training_size(d.sample, d.images.resolution, family);
  const int64_t warmup = warmup_updates(l.optim);
  return {
      {"ss_sd_model_name",
       std::filesystem::path(r.components.model.keys.pretrained_model_name_or_path).filename().string()},
      {"ss_output_name", r.run.name},
      {"ss_learning_rate", number(l.optim.learning_rate)},
      {"ss_unet_lr", number(l.update.unet_lr.value_or(l.optim.learning_rate))},
      {"ss_text_encoder_lr", d.denoise.train_text_encoder ? number(l.update.text_encoder_learning_rate) : none},
      {"ss_max_train_steps", number(l.optim.max_train_steps)},
      {"ss_lr_scheduler", l.optim.lr_scheduler},
      {"ss_lr_warmup_steps", number(warmup)},
      {"ss_optimizer", make_optimizer(l.optim)->full_name()},
      {"ss_max_grad_norm", number(l.optim.max_grad_norm)},
      {"ss_gradient_accumulation_steps", number(l.update.gradient_accumulation_steps)},
      {"ss_batch_size_per_device", number(d.batches.per_device_batch_size)},
      {"ss_resolution", fmt::format("({}, {})", size.width, size.height)},
      {"ss_enable_bucket", d.images.enable_bucket ? "True" : "False"},
      {"ss_mixed_precision", r.components.encoders.layers.activations_dtype == "bfloat16" ? "bf16" : "no"},
      {"ss_seed", number(r.run.seed)},
      {"ss_noise_offset", d.denoise.noise_offset != 0 ? number(d.denoise.noise_offset) : none},
      {"ss_multires_noise_iterations",
       d.denoise.multires_noise_iterations != 0 ? number(d.denoise.multires_noise_iterations) : none},
      {"ss_multires_noise_discount", number(d.denoise.multires_noise_discount)},
      {"ss_ip_noise_gamma", d.denoise.input_perturbation != 0 ? number(d.denoise.input_perturbation) : none},
      {"ss_loss_type", d.denoise.loss_type},
      {"ss_huber_schedule", d.denoise.huber_schedule},
      {"ss_huber_c", number(d.denoise.huber_c)},
      {"ss_huber_scale", number(d.denoise.huber_scale)},
      {"ss_debiased_estimation", l.process.debiased_estimation_loss ? "True" : "False"},
      {"ss_min_snr_gamma", l.process.snr_gamma > 0 ? number(l.process.snr_gamma) : none},
      {"ss_caption_dropout_rate", number(d.denoise.caption_dropout)},
  };
}

LoraPlan plan_lora(const TrainingRequest& r, const Family& family) {
  const LoraKeys& keys = r.learning.lora;
  LoraPlan lora{.config = training_lora(keys, family.spec().lora_targets(family.spec().denoiser())),
                .init = keys.lora_init.empty() ? "" : lora_file(keys.lora_init),
                .missing = missing_keys(keys.lora_missing_keys),
                .metadata = kohya_metadata(r, family)};
  lora.targets = lora.config.targets;
  if (r.data.denoise.train_text_encoder && keys.lora_target_modules.empty())
    for (const std::string& target : family.spec().lora_targets(family.spec().text_components().at(0)))
      lora.targets.push_back(target);
  return lora;
}

EvalPlan plan_evaluation(const DataKeys& d, const EvalKeys& keys, const TrainPlan& plan) {
  const Family& family = *plan.task.family;
  const bool records = plan.data.mode == DataMode::encoded_records;
  check(
      plan.data.images.folders.empty() || plan.task.references == 0, Code::invalid_config,
      "eval_every is {}; expected -1: images of eval_data_dir have no control images, as those of dataset_config have",
      keys.eval_every);
  EvalPlan eval{.keys = keys,
                .source = {.dataset_type = records ? d.source.dataset_type : "",
                           .train_data_dir = keys.eval_data_dir,
                           .train_split = d.source.train_split,
                           .image_column = d.source.image_column,
                           .caption_column = d.source.caption_column,
                           .cond_image_column = d.source.cond_image_column}};
  if (records || plan.data.mode == DataMode::synthetic_latents) {
    eval.source.array_columns = record_columns(family.spec(), plan.task.references);
    return eval;
  }
  eval.source.max_train_samples = keys.eval_max_number_of_samples_in_bucket;
  eval.images = {.resolution = d.images.resolution,
                 .center_crop = d.images.center_crop || d.images.random_crop,
                 .references = plan.task.references};
  if (!family.spec().videos()) return eval;
  eval.images = plan_images(d, family);
  eval.images.random_flip = false;
  eval.images.buckets = AspectBuckets::of({{plan.task.size.height, plan.task.size.width, plan.task.size.frames}});
  return eval;
}

/// Throws invalid_config for features that are not supported if several processes share one mesh, because no process
/// has all trained weights.
void check_joint_devices(const TrainingRequest& r) {
  const auto refuse = [](bool set, const char* key) {
    check(!set, Code::invalid_config, "{}: not supported with several processes on GPUs or TPUs; expected one process",
          key);
  };
  refuse(r.components.model.keys.train_new_vae, "train_new_vae");
  refuse(r.learning.lora.train_lora, "train_lora");
  refuse(!r.data.dreambooth.instance_data_dir.empty(), "instance_data_dir");
  if (r.samples)
    log_warning(
        "prompt is ignored: several processes on GPUs or TPUs train; convert a checkpoint to a model folder, then use "
        "generate");
}

}  // namespace

PlanParts plan_parts(const TrainingRequest& r, const ModelFolder& folder, const std::shared_ptr<const Family>& family,
                     const DeviceCounts& counts) {
  return {
      {"keys",
       [&r, family](TrainPlan&) {
         if (!r.run.has_all_weights) check_joint_devices(r);
         r.rules.check_training(*family);
         const int64_t batches = r.learning.update.gradient_accumulation_steps;
         check(batches >= 1, Code::invalid_config, "gradient_accumulation_steps is {}; expected 1 or more", batches);
       }},
      {"keys",
       [&r, &folder, family, counts](TrainPlan& plan) {
         const auto& [data, learning, model] = std::tie(r.data, r.learning, r.components.model.keys);
         const EncoderOptions& models = r.components.encoders;
         plan.run = r.run;
         plan.data.mode = data_mode(data, family->spec().videos());
         plan.denoisers = trained_denoisers(model.train_expert, *family);
         if (!data.inversion.placeholder_token.empty()) plan.inversion = data.inversion;
         plan.trains_text_encoders = data.denoise.train_text_encoder || plan.inversion;
         plan.boundary_ratio = data.sample.boundary_ratio;
         plan.replicas = counts.replicas;
         plan.optim = learning.optim.with_switches(family->spec().reference.always_clips_by_norm);
         plan.optim.learning_rate = learning.update.unet_lr.value_or(plan.optim.learning_rate);
         if (plan.optim.optimizer == "prodigy" && plan.optim.learning_rate < 0.1)
           log_warning(
               "learning_rate is {}; expected about 1 with optimizer=prodigy, where it is a factor of the step size "
               "that is found",
               plan.optim.learning_rate);
         plan.text_encoder_rate = learning.update.text_encoder_learning_rate;
         plan.rates_by_name = rates_by_name(learning.update.network_reg_lrs);
         plan.task = plan_task(data, learning, folder, family, plan.data.mode, counts);
         plan.loop = plan_loop(r.run, learning.loop, models.compile);
         plan.loop.title = plan.denoisers.size() == 1 && !plan.inversion ? "train " + plan.denoisers[0] : "train";
         plan.loop.step = plan_step(learning, models, plan);
         set_rates(plan);
         plan.tasks = tasks_per_expert(plan);
         if (learning.lora.train_lora) plan.lora = plan_lora(r, *family);
         if (model.train_new_vae && plan.data.mode == DataMode::cached_latents)
           plan.autoencoder = plan_autoencoder(learning, models.layers, plan.task, counts);
         if (plan.autoencoder) plan.loop.also_trained.insert(plan.autoencoder->task.model());
         if (plan.inversion) plan.loop.also_trained.insert(plan.inversion->placeholder_token);
         if (r.run.is_coordinator && r.run.has_all_weights) plan.samples = r.samples;
       }},
      {"sizes",
       [&r, family](TrainPlan& plan) {
         plan.data = plan_data(r.data, plan.data.mode, r.run, *family);
         if (!plan.data.images.folders.empty()) {
           plan.task.masked = plan.data.images.mask != MaskFrom::none;
           plan.task.sizes = true;
           plan.task.references = plan.data.images.references;
           plan.tasks = tasks_per_expert(plan);
         }
         if (plan.data.mode != DataMode::synthetic_latents) return;
         plan_synthetic(r.data, r.run, plan.task, plan.data.source.config);
         plan.tasks = tasks_per_expert(plan);
       }},
      {"evaluation", [&r](TrainPlan& plan) {
         if (r.learning.eval.eval_every > 0) plan.eval = plan_evaluation(r.data, r.learning.eval, plan);
       }}};
}

TrainPlan plan_training(const TrainingRequest& request, const ModelFolder& folder,
                        const std::shared_ptr<const Family>& family, const DeviceCounts& counts) {
  TrainPlan plan;
  for (const auto& [name, part] : plan_parts(request, folder, family, counts)) part(plan);
  return plan;
}

TrainPlan plan_training(const TrainingRequest& request, const ModelComponents& models) {
  models.denoiser_options();
  return plan_training(request, models.folder(), models.family(), models.device_counts());
}

void check_batch_size(const TrainPlan& plan, int64_t samples) {
  // DreamBooth repeats its few images; in other data a batch has no sample twice.
  check(plan.data.mode == DataMode::dreambooth || samples <= 0 || plan.batch_size() <= samples, Code::invalid_config,
        "per_device_batch_size: a batch of {} samples; expected at most {}, the number in the data", plan.batch_size(),
        samples);
}

TrainPlan with_data(TrainPlan plan, const DenoiseTask& task, const std::vector<ImageSize>& buckets, int64_t samples) {
  plan.task = task;
  plan.tasks.clear();
  for (const DenoiseTask& expert : tasks_per_expert(plan)) {
    if (buckets.empty()) plan.tasks.push_back(expert);
    for (const ImageSize& size : buckets) {
      DenoiseTask& t = plan.tasks.emplace_back(expert);
      t.size = {size.height, size.width, size.frames};
      if (buckets.size() > 1) t.name += (t.name.empty() ? "" : " ") + to_string(size);
    }
  }
  set_rates(plan);
  check_batch_size(plan, samples);
  if (plan.optim.max_train_steps > 0) return plan;
  const int64_t epochs = plan.loop.keys.num_train_epochs;
  check(epochs > 0, Code::invalid_config, "You must set max_train_steps or num_train_epochs to a positive integer");
  check(samples > 0, Code::invalid_config,
        "max_train_steps is {}; expected more than 0: the number of samples is not known before they are read",
        plan.optim.max_train_steps);
  plan.loop.step.optim.max_train_steps = std::max<int64_t>(1, epochs * samples / plan.update_size());
  return plan;
}

bool TrainPlan::trains(const std::string& component) const {
  return std::ranges::count(trained_components(*this), component) > 0;
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
    if (plan.denoisers.size() > 1) t.name = expert;
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
                : from.dataset_type == "synthetic"
                    ? from.dataset_type
                    : from.dataset_config + from.hf_train_files + from.grain_train_files + from.train_data_dir +
                          from.hf_data_dir + from.dataset_name);
  if (plan.data.dreambooth) add("class_images", plan.data.dreambooth->class_data_dir);
  if (plan.data.dreambooth || plan.data.mode == DataMode::cached_latents) add("cache", plan.data.cache.folder);
  add("size",
      fmt::format("{}x{}{}", size.height, size.width, size.frames > 1 ? fmt::format(", {} frames", size.frames) : ""));
  if (plan.data.images.several_sizes()) add("buckets", "as the sizes in the data need");
  add("batch", plan.batch_size());
  add("replicas", plan.replicas);
  add("accumulation", step.accumulation);
  add("update", plan.update_size());
  if (step.optim.max_train_steps > 0) add("steps", step.optim.max_train_steps);
  if (step.optim.max_train_steps <= 0) add("epochs", plan.loop.keys.num_train_epochs);
  add("trained", plan.inversion
                     ? fmt::format("{} as {} {}", plan.inversion->placeholder_token, plan.inversion->num_vectors,
                                   plan.inversion->num_vectors == 1 ? "vector" : "vectors")
                     : fmt::format("{}", fmt::join(plan.denoisers, ", ")));
  add("learning_rate", step.optim.learning_rate);
  if (plan.trains_text_encoders) {
    add("trained_text_encoders", fmt::format("{}", fmt::join(encoders, ", ")));
    add("text_encoder_learning_rate", step.learning_rates.at(encoders.front()));
  }
  if (step.ema_decay > 0) add("ema_decay", step.ema_decay);
  if (plan.lora)
    add("lora",
        fmt::format(
            "{}{} in {}{}",
            plan.lora->config.kind == adapters()[0]
                ? ""
                : fmt::format("{}{}", plan.lora->config.kind->name(), plan.lora->config.kind->has_rank() ? ", " : ""),
            plan.lora->config.kind->has_rank()
                ? fmt::format("rank {}, alpha {:g},", plan.lora->config.rank, plan.lora->config.alpha)
                : "",
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
