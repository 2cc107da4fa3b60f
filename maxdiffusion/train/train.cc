#include "maxdiffusion/train/train.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/tasks/latent_diffusion.h"
#include "maxdiffusion/train/companions.h"
#include "maxdiffusion/train/evaluation.h"
#include "maxdiffusion/train/training_data.h"

namespace md {
namespace {

using nlohmann::json;

/// A phase of the run from now on: told in the log and, where a key asks for it, in a file.
class Phase {
 public:
  Phase(const RunConfig& c, std::string name) : name_(std::move(name)) {
    if (c.run.write_timing_metrics) file_ = c.run.timing_metrics_file;
    tell(fmt::format("Starting: {}...", name_));
  }
  Phase(const Phase&) = delete;
  ~Phase() {
    tell(fmt::format("Finished: {} - Duration: {:.4f} seconds", name_,
                     std::chrono::duration<double>(Clock::now() - start_).count()));
  }

 private:
  using Clock = std::chrono::steady_clock;
  void tell(const std::string& line) {
    log_info("{}", line);
    if (file_.empty()) return;
    try {
      FileWriter w(file_, FileWriter::Open::append);
      w.write((line + "\n").data(), line.size() + 1);
    } catch (const Error& e) {
      log_warning("timing_metrics_file ends here, the run goes on: {}", e.what());
      file_.clear();
    }
  }
  std::string name_, file_;
  Clock::time_point start_ = Clock::now();
};

std::set<std::string> components_of(const ParamTable& params) {
  std::set<std::string> names;
  for (const Param& p : params.params()) names.insert(p.model);
  return names;
}

TimestepBias timestep_bias(const std::map<std::string, std::string>& members) {
  TimestepBias bias;
  for (const auto& [name, text] : members) {
    const json value = json::parse(text);
    auto number = [&] {
      check(value.is_number(), Code::invalid_config, "timestep_bias: {} is {}; expected a number", name, text);
      return value.get<double>();
    };
    if (name == "strategy") {
      check(value.is_string(), Code::invalid_config, "timestep_bias: strategy is {}; expected a text", text);
      bias.strategy = value;
    } else if (name == "multiplier") {
      bias.multiplier = number();
    } else if (name == "portion") {
      bias.portion = number();
    } else if (name == "begin") {
      bias.begin = static_cast<int64_t>(number());
    } else if (name == "end") {
      bias.end = static_cast<int64_t>(number());
    } else {
      fail(Code::invalid_config,
           "timestep_bias: there is no member '{}'; known are strategy, multiplier, portion, begin, end", name);
    }
  }
  return bias;
}

/// The noise of training: the folder's schedule, with what the run's keys say of it.
NoiseSchedule training_noise(const RunConfig& c, const ModelFolder& folder) {
  json config = parse_scheduler_config(folder.scheduler_config());
  for (const auto& [name, text] : c.sample.diffusion_scheduler_config) {
    const json value = json::parse(text);
    if (value == "" || name == "_class_name" || name == "timestep_spacing") continue;
    if (name == "rescale_zero_terminal_snr") config.erase("rescale_betas_zero_snr");
    config[name] = value;
  }
  if (!c.model.prediction_type.empty()) config["prediction_type"] = c.model.prediction_type;
  return NoiseSchedule::from_json(config);
}

/// Starting values of the matrices, of `lora_init` or drawn; made when called.
std::function<HostArrays()> first_lora(const RunConfig& c, const ModelFolder& folder, const ParamTable& params) {
  std::vector<std::string> targets = training_lora(c.lora, "unet").targets;
  if (c.loss.train_text_encoder && c.lora.lora_target_modules.empty()) {
    const std::vector<std::string> more = training_lora(c.lora, "text_encoder").targets;
    targets.insert(targets.end(), more.begin(), more.end());
  }
  check_lora_targets(targets, params);
  if (c.lora.lora_init.empty())
    return [&params, seed = static_cast<uint64_t>(c.run.seed)] { return initial_lora(params, seed); };
  const HostArrays values = initial_lora(params, read_lora(c.lora.lora_init, LoraTargets(denoiser_params(folder))),
                                         training_lora(c.lora, "unet"));
  return [values] { return values; };
}

/// What the reference refuses before it starts, too, and keys that do not go together.
void validate(const RunConfig& c, const ModelFolder& folder) {
  check(!c.loss.train_text_encoder || !folder.text_encoder_2 || c.lora.train_lora, Code::invalid_config,
        "train_text_encoder: models with two text encoders are trained without them, except with train_lora");
  check(chosen_loras(c.lora).empty(), Code::invalid_config,
        "lora_files and lora_config are for generate; training starts from matrices given by lora_init");
  check(c.lora.train_lora || c.lora.lora_init.empty(), Code::invalid_config, "lora_init needs train_lora=true");
  const bool dreambooth = !c.dreambooth.instance_data_dir.empty();
  if (dreambooth) {
    for (const auto& [key, text] : {std::pair{"class_data_dir", c.dreambooth.class_data_dir},
                                    std::pair{"instance_prompt", c.dreambooth.instance_prompt},
                                    std::pair{"class_prompt", c.dreambooth.class_prompt}})
      check(!text.empty(), Code::invalid_config, "DreamBooth (instance_data_dir is set) needs {}", key);
    check(
        c.loss.replay_batches.empty() && !c.model.train_new_vae && c.data.caption_dropout == 0 && c.loss.snr_gamma <= 0,
        Code::invalid_config,
        "DreamBooth goes with neither replay_batches, train_new_vae, caption_dropout nor snr_gamma");
    check(c.data.max_train_samples < 0 && !c.data.random_flip && !c.data.random_crop, Code::invalid_config,
          "DreamBooth takes every picture of both folders as it is: without max_train_samples, random_flip and "
          "random_crop");
  }
  check(c.loss.replay_batches.empty() ||
            (c.data.caption_dropout == 0 && c.loss.noise_offset == 0 && c.loss.input_perturbation == 0 &&
             !c.model.train_new_vae && timestep_bias(c.loss.timestep_bias).strategy == "none"),
        Code::invalid_config,
        "replay_batches holds what is drawn: it goes with neither caption_dropout, noise_offset, input_perturbation, "
        "timestep_bias nor train_new_vae");
  check(!c.loss.train_text_encoder || dreambooth || !c.loss.cache_latents_text_encoder_outputs, Code::invalid_config,
        "Cannot train text encoder and cache text encoder outputs. Set either train_text_encoder or "
        "cache_latents_text_encoder_outputs to False");
  check(!c.loss.train_text_encoder || c.loss.replay_batches.empty(), Code::invalid_config,
        "train_text_encoder with replay_batches: the file holds what the text encoder has made");
  if (dreambooth) check_plain_pictures(c, "DreamBooth");
  if (!c.loss.replay_batches.empty()) check_plain_pictures(c, "replay_batches");
  check(!c.data.enable_bucket || !c.model.train_new_vae, Code::invalid_config,
        "enable_bucket does not go with train_new_vae, which learns from pictures of one size");
  check(!c.data.original_size_conditioning || folder.unet.addition_embed_type, Code::invalid_config,
        "original_size_conditioning: this UNet is not told sizes; only SDXL's are");
  const bool folder_of_masks = !c.data.conditioning_data_dir.empty();
  check(!folder_of_masks || !c.data.alpha_mask, Code::invalid_config,
        "alpha_mask and conditioning_data_dir are both set; masks come from one of them");
  check(!folder_of_masks || c.loss.masked_loss, Code::invalid_config, "conditioning_data_dir needs masked_loss=true");
  check(!c.loss.masked_loss || c.data.alpha_mask || folder_of_masks, Code::invalid_config,
        "masked_loss needs masks: alpha_mask=true, or conditioning_data_dir=FOLDER");
}

}  // namespace

void train(const RunConfig& c, const OnSample& on_sample) {
  const std::string run = c.folder(), samples = run + "/samples";
  auto phase = std::make_unique<Phase>(c, "devices and model folder");
  const Devices devices = open_devices(c);
  ModelFolder folder =
      ModelFolder::open(c.model.pretrained_model_name_or_path, c.model.clip_bpe_file, c.model.revision);
  validate(c, folder);
  c.reference.judge_model(folder.unet.norm_num_groups);
  make_folders(samples);
  write_file_atomic(run + "/config.yml", c.to_yaml());
  if (c.run.save_config_to_gcs) {
    check(!c.run.base_output_directory.empty(), Code::invalid_config, "save_config_to_gcs needs base_output_directory");
    const std::string copy = c.run.base_output_directory + "/" + c.run.run_name;
    make_folders(copy);
    write_file_atomic(copy + "/config.yml", c.to_yaml());
  }
  phase.reset();

  Companions companions(c, devices, folder);
  LatentDiffusion task;
  LoopCallbacks callbacks;
  task.noise = training_noise(c, folder);
  task.timestep_bias = timestep_bias(c.loss.timestep_bias);
  task.snr_gamma = c.loss.snr_gamma;
  task.noise_offset = c.loss.noise_offset;
  task.input_perturbation = c.loss.input_perturbation;
  phase = std::make_unique<Phase>(c, "data");
  TrainingData training = training_data(c, devices, folder, companions, task, callbacks.constants);
  std::unique_ptr<Dataset> data = std::move(training.batches);
  task.folder = folder;
  const std::vector<LatentDiffusion> tasks = in_sizes(task, training.buckets);
  phase.reset();

  LoopOptions o = loop_options(c, run, "train unet");
  const int64_t update = update_size(c, task);
  log_info("global batch of {}, {} pictures an update", task.batch_size, update);
  o.step.optim = c.optim.with_switches(!folder.text_encoder_2);
  o.step.optim.learning_rate = scaled_rate(c.optim, c.optim.learning_rate, update);
  if (o.step.optim.max_train_steps <= 0) {
    check(c.loss.num_train_epochs > 0, Code::invalid_config,
          "You must set max_train_steps or num_train_epochs to a positive integer");
    check(data->size() > 0, Code::invalid_config,
          "max_train_steps is {}, and the number of samples is not known before they are read; give max_train_steps",
          c.optim.max_train_steps);
    o.step.optim.max_train_steps = std::max<int64_t>(1, c.loss.num_train_epochs * data->size() / update);
  }
  if (o.step.optim.max_grad_norm > 0) log_info("gradients are clipped to norm {}", o.step.optim.max_grad_norm);
  o.step.accumulation = c.loss.gradient_accumulation_steps;
  o.step.ema_decay = c.loss.ema_decay;
  o.step.learning_rates["text_encoder"] = scaled_rate(c.optim, c.loss.text_encoder_learning_rate, update);
  o.step.learning_rates["text_encoder_2"] = o.step.learning_rates["text_encoder"];
  const bool lora = c.lora.train_lora;
  o.step.variation = [&c, lora](const std::string& component, const Scope& s) {
    const bool learned = component == "unet" || (component.starts_with("text_encoder") && c.loss.train_text_encoder);
    if (learned) return lora ? lora_scope(s, training_lora(c.lora, component)) : s;
    return s.with(companion(s.options())).frozen();
  };
  o.sample_every = c.sample.sample_every;
  o.save_final_checkpoint = c.run.save_final_checkpoint;

  callbacks.initial = [&](const ParamTable& p) {
    auto base = std::make_shared<const ParamTable>(base_params(p));
    std::vector<std::function<HostArrays()>> parts;
    for (const std::string& component : components_of(*base)) parts.push_back(companions.open(*base, component));
    if (std::any_of(p.params().begin(), p.params().end(), is_lora)) parts.push_back(first_lora(c, folder, p));
    return [parts, base] {
      HostArrays all;
      for (const auto& part : parts) all.merge(part());
      return all;
    };
  };
  callbacks.complete = [&](CheckpointContent& content, const ParamTable& params, const HostArrays& trained) {
    companions.complete(content);
    if (!lora) return;
    content.more = [file = trained_lora(params, trained, training_lora(c.lora, "unet")),
                    two = folder.text_encoder_2.has_value()](const std::string& to) {
      write_peft_lora(to, file);
      write_kohya_lora(to + "/lora_kohya.safetensors", file, two);
    };
  };
  std::optional<Evaluation> evaluation;
  o.eval_every = c.eval.eval_every;
  if (o.eval_every > 0) {
    evaluation.emplace(devices, task, held_out_fields(c, folder, companions, task), c.eval, o.step, o.seed, c.compile);
    callbacks.evaluate = [&](int64_t step, const auto& value) { return evaluation->run(step, value); };
  }
  auto draw = [&](int64_t step, const ParamTable& params, const HostArrays& trained) {
    if (!on_sample || c.sample.prompt.empty()) return;
    const WeightsOf weights = [&](const ParamTable& p, const std::string& component) {
      const bool learned = std::any_of(params.params().begin(), params.params().end(),
                                       [&](const Param& q) { return q.trainable && q.model == component; });
      if (learned && !lora) return of_component(p, component, trained);
      HostArrays values = companions.weights()(p, component);
      if (learned) merge_loras({{trained_lora(params, trained, training_lora(c.lora, "unet")), 1}}, p, values);
      return values;
    };
    std::unique_ptr<TextEncoder> own;
    if (c.loss.train_text_encoder)
      own = std::make_unique<TextEncoder>(devices, folder, companions.batch(), weights, scope_options(c.model),
                                          c.compile);
    const std::string path =
        on_sample({devices, c, folder, weights, own ? *own : companions.text(), companions.coder(), step, samples});
    if (!path.empty()) log_info("pictures of step {}: {}", step, path);
  };
  if (o.sample_every > 0) callbacks.sample = draw;
  phase = std::make_unique<Phase>(c, "training");
  std::vector<const Task*> all_tasks;
  for (const LatentDiffusion& t : tasks) all_tasks.push_back(&t);
  Trained t = train_loop(devices, all_tasks, std::move(data), o, callbacks);
  phase.reset();
  if (o.sample_every != 0) draw(t.steps, t.params, t.values);
}

}  // namespace md
