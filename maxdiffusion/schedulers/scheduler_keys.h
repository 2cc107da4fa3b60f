// Keys that change a model's scheduler_config.json, and the two configs that result: one for sampling, one for training
// and checkpoints. Both have the fields that training depends on, so that a checkpoint is sampled as it was trained.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <map>
#include <optional>
#include <string>

#include "maxdiffusion/base/key_values.h"

namespace md {

struct SchedulerKeys {
  std::string prediction_type, scheduler;
  std::map<std::string, std::string> diffusion_scheduler_config;
  std::optional<double> flow_shift, base_shift, max_shift;
  std::optional<bool> time_shift;
  template <class V>
  void visit(V&& v) {
    v("prediction_type", prediction_type, "epsilon, v_prediction, sample; empty: the scheduler folder's");
    v("scheduler", scheduler,
      "sampler by name (euler, ddim, dpmpp_2m_karras, unipc, …), in place of the model folder's; empty: the folder's");
    v("flow_shift", flow_shift,
      "shift of sampling towards noise, for flow-matching models (1: none); null: the scheduler's");
    v("time_shift", time_shift,
      "a shift that grows with the size of the sample (dynamic shifting); flow_shift replaces it; null: the "
      "scheduler's use_dynamic_shifting");
    v("base_shift", base_shift, "logarithm of that shift at 256 tokens of an image; null: the scheduler's", finite());
    v("max_shift", max_shift, "logarithm of that shift at 4096 tokens; null: the scheduler's", finite());
    v("diffusion_scheduler_config", diffusion_scheduler_config,
      "overrides fields of scheduler_config.json, for sampling and, if training reads them, for training");
  }
};

/// `text`: of scheduler_config.json. Every member of diffusion_scheduler_config replaces the file's (an empty text
/// leaves it), then prediction_type, scheduler (sampler_names.h; fields of the mapping stay, its class does not),
/// time_shift (use_dynamic_shifting), base_shift, max_shift, then flow_shift (which is `shift` for some samplers, and
/// ends a shift by size). A mapping whose prediction_type is another than the flow that the file says is left aside
/// whole, with a line in the log: the reference's files hold one that its models do not read. Throws invalid_config.
nlohmann::json sampling_config(const std::string& text, const SchedulerKeys& keys);
/// Likewise, but only fields that training depends on are replaced (num_train_timesteps, beta_…, trained_betas,
/// rescale_betas_zero_snr, prediction_type); the sampler and its options stay the file's.
nlohmann::json training_config(const std::string& text, const SchedulerKeys& keys);

}  // namespace md
