// Keys that change a model's scheduler_config.json, and the two configs that result: one for sampling, one for training
// and checkpoints. Both have the fields on which training depends, so that a checkpoint is sampled as it was trained.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <map>
#include <optional>
#include <string>

#include "maxdiffusion/base/key_values.h"

namespace md {

struct SchedulerKeys {
  std::string prediction_type, scheduler, sigma_schedule;
  std::map<std::string, std::string> diffusion_scheduler_config;
  std::optional<double> flow_shift, base_shift, max_shift;
  std::optional<bool> time_shift;
  template <class V>
  void visit(V&& v) {
    v("prediction_type", prediction_type, "epsilon, v_prediction, sample; empty: the scheduler folder's");
    v("scheduler", scheduler,
      "sampler by name (euler, ddim, dpmpp_2m_karras, unipc, …), in place of the model folder's; empty: the folder's");
    v("sigma_schedule", sigma_schedule,
      "how the sampler's noise levels are spaced, in place of what its name or the folder says; empty: as they say",
      one_of_or_empty({"training", "karras", "exponential", "beta", "kl_optimal", "simple", "sgm_uniform", "ays_sd15",
                       "ays_sdxl", "ays_svd", "gits"}));
    v("flow_shift", flow_shift,
      "shift of sampling towards noise, for flow-matching models (1: none); null: the scheduler's");
    v("time_shift", time_shift,
      "a shift that grows with the size of the sample (dynamic shifting); flow_shift replaces it; null: the "
      "scheduler's use_dynamic_shifting");
    v("base_shift", base_shift, "logarithm of the shift of time_shift at 256 tokens of an image; null: the scheduler's",
      finite());
    v("max_shift", max_shift, "logarithm of the shift of time_shift at 4096 tokens; null: the scheduler's", finite());
    v("diffusion_scheduler_config", diffusion_scheduler_config,
      "overrides fields of scheduler_config.json, for sampling and, if training reads them, for training");
  }
};

/// `text`: scheduler_config.json. Fields of diffusion_scheduler_config replace the file's (except empty ones), then
/// prediction_type, scheduler (sampler_names.h; keeps fields of the mapping but not its class), sigma_schedule (a field
/// of its own, which replaces use_karras_sigmas and the like), time_shift (use_dynamic_shifting), base_shift,
/// max_shift, then flow_shift (`shift` for some samplers; disables dynamic shifting). Ignores a mapping for models that
/// are not flow-matching if the model is one, and logs it. Throws invalid_config.
nlohmann::json sampling_config(const std::string& text, const SchedulerKeys& keys);
/// Like the above, but replaces only fields on which training depends (num_train_timesteps, beta_…, trained_betas,
/// rescale_betas_zero_snr, prediction_type), not the sampler and its options.
nlohmann::json training_config(const std::string& text, const SchedulerKeys& keys);

}  // namespace md
