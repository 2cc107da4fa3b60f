#include "maxdiffusion/run/plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/settings/compatibility.h"

namespace md {

DenoiseTask planned_task(const RunConfig& c, std::shared_ptr<const Family> family,
                         const nlohmann::json& scheduler_config, int64_t devices, int64_t replicas) {
  const bool in_step = !c.denoise.cache_latents_text_encoder_outputs && !c.is_dreambooth();
  DenoiseTask t;
  t.family = std::move(family);
  t.process = make_process(scheduler_config, c.process);
  trained_denoisers(c, *t.family);  // refuses a train_expert that the model does not have
  t.images = t.family->required_images() > 0;
  t.noise = drawn_noise_input(c.denoise.noise_offset, c.denoise.input_perturbation);
  if (in_step) t.media = pixels_input();
  if (in_step || c.denoise.train_text_encoder) t.text = tokens_input();
  t.batch_size = part_of_replica(global_batch(c.batches, devices), replicas);
  t.size = training_size(c, *t.family);
  t.conditioning_size = t.size;
  t.guidance = c.sample.guidance_scale;
  if (c.is_dreambooth()) {
    t.prior_loss_weight = c.dreambooth.prior_loss_weight;
  } else {
    t.caption_dropout = c.denoise.caption_dropout;
    t.masked = c.denoise.masked_loss || c.images.alpha_mask;
    t.sizes = c.images.enable_bucket || c.images.original_size_conditioning;
  }
  return t;
}

std::vector<std::string> trained_denoisers(const RunConfig& c, const Family& family) {
  std::vector<std::string> all = family.spec().denoisers;
  const std::string& expert = c.model.train_expert;
  if (all.size() != 2) {
    check(expert.empty(), Code::invalid_config, "train_expert is '{}', but this model has one denoiser", expert);
    return all;
  }
  check(!expert.empty(), Code::invalid_config,
        "train_expert is ''; this model has two denoisers: expected high, low or both");
  if (expert == "both") return all;
  return {all[expert == "high" ? 0 : 1]};
}

std::vector<DenoiseTask> of_experts(const RunConfig& c, const DenoiseTask& task) {
  const std::vector<std::string> all = task.family->spec().denoisers, trained = trained_denoisers(c, *task.family);
  if (all.size() == 1) return {task};
  const auto end = static_cast<double>(task.process->num_train_timesteps());
  const double boundary = c.sample.boundary_ratio.value_or(*task.family->spec().boundary_ratio) * end;
  std::vector<DenoiseTask> tasks;
  for (const std::string& expert : trained) {
    DenoiseTask& t = tasks.emplace_back(task);
    t.expert = expert;
    t.takes_turns = trained.size() > 1;
    t.process = expert == all[0] ? task.process->between(boundary, end) : task.process->between(0, boundary);
  }
  return tasks;
}

bool is_trained(const RunModels& m, const std::string& component) {
  return std::ranges::count(trained_denoisers(m.config(), *m.family()), component) > 0 ||
         (m.config().denoise.train_text_encoder &&
          std::ranges::count(m.family()->spec().text_components(), component) > 0);
}

StepOptions planned_step(const RunModels& m, int64_t samples) {
  const RunConfig& c = m.config();
  StepOptions s;
  s.scope = m.denoiser_options();
  s.optim = c.optim.with_switches(m.family()->spec().reference.always_clips_by_norm);
  s.optim.learning_rate = scaled_rate(c.optim, c.optim.learning_rate, samples);
  s.accumulation = c.update.gradient_accumulation_steps;
  s.ema_decay = c.update.ema_decay;
  s.own_count = trained_denoisers(c, *m.family()).size() > 1;
  for (const std::string& encoder : m.family()->spec().text_components())
    s.learning_rates[encoder] = scaled_rate(c.optim, c.update.text_encoder_learning_rate, samples);
  s.variation = [&m](const std::string& component, const Scope& scope) {
    if (!is_trained(m, component)) {
      const bool autoencoder = component == m.family()->spec().autoencoder->component;
      const EncoderKeys& keys = m.config().encoders;
      return scope
          .with(autoencoder ? autoencoder_options(scope.options(), keys) : text_encoder_options(scope.options(), keys))
          .frozen();
    }
    ScopeOptions options = scope.options();
    if (std::ranges::count(m.family()->spec().denoisers, component) == 0) options.quantization = nullptr;
    const LoraKeys& lora = m.config().lora;
    return lora.train_lora
               ? lora_scope(scope.with(options), training_lora(lora, m.family()->spec().lora_targets(component)))
               : scope.with(options);
  };
  return s;
}

PlannedTraining planned_training(const RunModels& m, int64_t devices, int64_t replicas) {
  const RunConfig& c = m.config();
  check_training_keys(c, *m.family());
  check(c.update.gradient_accumulation_steps >= 1, Code::invalid_config,
        "gradient_accumulation_steps is {}; expected 1 or more", c.update.gradient_accumulation_steps);
  const DenoiseTask task =
      planned_task(c, m.family(), training_config(m.folder().scheduler_config(), c.scheduler), devices, replicas);
  return {of_experts(c, task), planned_step(m, task.batch_size * replicas * c.update.gradient_accumulation_steps)};
}

std::optional<SamplePlan> planned_samples(const RunConfig& c, const RunInfo& run) {
  if (c.sample.prompt.empty() || !run.is_coordinator || !run.has_all_weights) return std::nullopt;
  if (c.run.sample_every == 0 && !c.run.enable_ssim && !c.run.enable_generate_video_for_eval) return std::nullopt;
  return SamplePlan{c.run.sample_every, c.run.enable_generate_video_for_eval, c.run.enable_ssim};
}

double scaled_rate(const OptimConfig& optim, double rate, int64_t samples) {
  return optim.scale_lr ? rate * static_cast<double>(samples) : rate;
}

}  // namespace md
