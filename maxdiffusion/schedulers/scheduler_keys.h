// Keys that change a model's scheduler_config.json, and the two configs that follow: what is sampled with, and what is
// trained on and saved. Both hold what was trained, so that a checkpoint draws as its run does.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <map>
#include <string>

namespace md {

struct SchedulerKeys {
  std::string prediction_type;
  std::map<std::string, std::string> diffusion_scheduler_config;
  template <class V>
  void visit(V&& v) {
    v("prediction_type", prediction_type, "epsilon, v_prediction, sample; empty: the scheduler folder's");
    v("diffusion_scheduler_config", diffusion_scheduler_config,
      "overrides members of scheduler_config.json, for sampling and, where training reads them, for training");
  }
};

/// `text`: of scheduler_config.json. Every member of diffusion_scheduler_config replaces the file's (an empty text
/// leaves it), then prediction_type. Throws invalid_config.
nlohmann::json sampling_config(const std::string& text, const SchedulerKeys& keys);
/// The same, but only members that the noise of training depends on are replaced; the sampler stays the file's.
nlohmann::json training_config(const std::string& text, const SchedulerKeys& keys);

}  // namespace md
