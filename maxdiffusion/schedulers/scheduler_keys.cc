#include "maxdiffusion/schedulers/scheduler_keys.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sampler_names.h"

namespace md {
namespace {

using nlohmann::json;

constexpr const char* kZeroSnr = "rescale_betas_zero_snr";
constexpr const char* kOfTraining[] = {"num_train_timesteps", "beta_start", "beta_end",       "beta_schedule",
                                       "trained_betas",       kZeroSnr,     "prediction_type"};

/// Whether the mapping is for another kind of model than the folder's, as in MaxDiffusion's configs of flow-matching
/// models, which ignore it.
bool is_for_others(const json& config, const std::map<std::string, std::string>& mapping) {
  const auto type = mapping.find("prediction_type");
  if (!is_flow_matching(config) || type == mapping.end()) return false;
  const json prediction = parse_json(type->second);
  if (prediction == json("") || prediction == "flow_prediction") return false;
  log_info_once(
      "diffusion_scheduler_config is ignored: it is for models that predict {}; this is a flow-matching model",
      prediction.dump());
  return true;
}

/// Sets the fields for the keys of shifting by size.
void shift_by_size(json& config, const SchedulerKeys& keys) {
  if (!is_flow_matching(config)) {
    if (keys.time_shift || keys.base_shift || keys.max_shift)
      log_warning("time_shift, base_shift and max_shift are ignored: this is not a flow-matching model");
    return;
  }
  if (keys.time_shift) config["use_dynamic_shifting"] = *keys.time_shift;
  if (keys.base_shift) config["base_shift"] = *keys.base_shift;
  if (keys.max_shift) config["max_shift"] = *keys.max_shift;
  if (keys.flow_shift && config.contains("use_dynamic_shifting")) config["use_dynamic_shifting"] = false;
}

json configured(const std::string& text, const SchedulerKeys& keys, bool training) {
  json config = parse_scheduler_config(text);
  static const std::map<std::string, std::string> kNothing;
  std::set<std::string> fixed;  // fields that the mapping sets
  std::vector<std::string> unread;
  for (const auto& [field_name, value_text] :
       is_for_others(config, keys.diffusion_scheduler_config) ? kNothing : keys.diffusion_scheduler_config) {
    const json value = parse_json(value_text);
    if (value == json("")) continue;
    const std::string name =
        field_name == "rescale_zero_terminal_snr" ? kZeroSnr : field_name;  // MaxDiffusion's spelling
    if (training && std::ranges::find(kOfTraining, name) == std::end(kOfTraining)) continue;
    if (name == kZeroSnr) config.erase("rescale_zero_terminal_snr");
    if (name == "_class_name" && !keys.scheduler.empty()) continue;
    if (name.starts_with("beta_") || name == "trained_betas" || (name == kZeroSnr && value != false))
      if (!config.contains(name) || config[name] != value) unread.push_back(field_name);
    config[name] = value;
    fixed.insert(name);
  }
  if (!keys.prediction_type.empty()) config["prediction_type"] = keys.prediction_type;
  if (is_flow_matching(config) && !unread.empty())
    log_line_once(LogLevel::warning,
                  fmt::format("diffusion_scheduler_config: {} {} ignored: a flow-matching model has no betas",
                              fmt::join(unread, ", "), unread.size() == 1 ? "is" : "are"));
  if (training) return config;
  if (!keys.scheduler.empty()) choose_sampler(config, keys.scheduler, fixed);
  if (!keys.sigma_schedule.empty()) {
    for (const char* name : {"use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas"})
      config[name] = false;
    config["sigma_schedule"] = keys.sigma_schedule;
  }
  const auto name_of = [](const json& c) { return c.value("_class_name", json("no scheduler")).dump(); };
  if (const json file = parse_scheduler_config(text); name_of(file) == name_of(config))
    log_info_once("scheduler: {} (from the model folder)", name_of(config));
  else
    log_info_once("scheduler: {} (from {}; the model folder has {})", name_of(config),
                  keys.scheduler.empty() ? "diffusion_scheduler_config" : "scheduler=" + keys.scheduler, name_of(file));
  shift_by_size(config, keys);
  const SamplerClass* sampler = find_sampler(field<std::string>(config, "_class_name", ""));
  if (keys.flow_shift && sampler && sampler->shift) config[sampler->shift] = *keys.flow_shift;
  // diffusers' pipelines pass eta = 0 to every sampler that has one, TCD's too, whose own default is 0.3.
  const auto reads = [&](const char* name) {
    return sampler && std::ranges::any_of(sampler->fields, [&](std::string_view f) { return f == name; });
  };
  if (reads("eta") && !config.contains("eta")) config["eta"] = 0.0;
  return config;
}

}  // namespace

json sampling_config(const std::string& text, const SchedulerKeys& keys) { return configured(text, keys, false); }
json training_config(const std::string& text, const SchedulerKeys& keys) { return configured(text, keys, true); }

}  // namespace md
