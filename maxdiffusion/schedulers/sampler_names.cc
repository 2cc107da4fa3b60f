#include "maxdiffusion/schedulers/sampler_names.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

using nlohmann::json;

constexpr const char* kMissing[] = {"heunpp2", "dpm_fast",      "dpm_adaptive",  "ipndm",      "edm_euler",
                                    "er_sde",  "res_multistep", "ddim_parallel", "consistency"};

/// "DPM++ 2M Karras" → "dpmpp_2m_karras".
std::string spelled(const std::string& name) {
  std::string out;
  for (const char c : name) {
    if (c == '+')
      out += 'p';
    else if (c == ' ' || c == '-' || c == '_')
      out += out.empty() || out.back() == '_' ? "" : "_";
    else
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return out;
}

struct Choice {
  const SamplerClass* sampler;
  const SamplerName* word;
};

/// The sampler with this normalized name or alias; null if unknown.
Choice find(const std::string& word) {
  for (const SamplerClass& s : sampler_classes())
    for (const SamplerName& w : s.words)
      if (word == w.word || std::ranges::find(w.aliases, word) != w.aliases.end()) return {&s, &w};
  return {};
}

/// "flow_euler, dpmpp_2m or unipc": the first name of each sampler that supports such models.
std::string words_for(bool flow) {
  std::vector<std::string> words;
  for (const SamplerClass& s : sampler_classes())
    if (s.models == SamplerClass::noise_or_flow || (s.models == SamplerClass::flow) == flow)
      words.emplace_back(s.words.front().word);
  const std::string last = words.back();
  words.pop_back();
  return fmt::format("{} or {}", fmt::join(words, ", "), last);
}

}  // namespace

std::vector<std::string> sampler_names() {
  std::vector<std::string> words;
  for (const SamplerClass& s : sampler_classes())
    for (const SamplerName& w : s.words) words.emplace_back(w.word);
  return words;
}

std::string sampler_name(const std::string& name) {
  if (std::ranges::count(scheduler_names(), name) > 0) return name;
  const std::string word = spelled(name);
  const SamplerName* found = find(word).word;
  if (!found && word.starts_with("k_")) found = find(word.substr(2)).word;  // k-diffusion's, in the web UI and kohya's
  return found ? found->word : "";
}

WebUiSampler web_ui_sampler(const std::string& title) {
  if (const std::string name = sampler_name(title); !name.empty()) return {name, ""};
  for (size_t blank = title.find(' '); blank != title.npos; blank = title.find(' ', blank + 1)) {
    const std::string name = sampler_name(title.substr(0, blank)), schedule = schedule_named(title.substr(blank + 1));
    if (!name.empty() && !schedule.empty()) return {name, schedule};
  }
  return {};
}

SamplerTitle sampler_title(const json& config) {
  static const std::map<std::string, std::string> kTitles = {{"EulerDiscreteScheduler", "Euler"},
                                                             {"FlowMatchEulerDiscreteScheduler", "Euler"},
                                                             {"EulerAncestralDiscreteScheduler", "Euler a"},
                                                             {"LMSDiscreteScheduler", "LMS"},
                                                             {"HeunDiscreteScheduler", "Heun"},
                                                             {"FlowMatchHeunDiscreteScheduler", "Heun"},
                                                             {"KDPM2DiscreteScheduler", "DPM2"},
                                                             {"KDPM2AncestralDiscreteScheduler", "DPM2 a"},
                                                             {"DPMSolver2SAncestralScheduler", "DPM++ 2S a"},
                                                             {"DPMSolverSDEScheduler", "DPM++ SDE"},
                                                             {"DPMSolver3MSDEScheduler", "DPM++ 3M SDE"},
                                                             {"RestartScheduler", "Restart"},
                                                             {"DDIMScheduler", "DDIM"},
                                                             {"PNDMScheduler", "PLMS"},
                                                             {"UniPCMultistepScheduler", "UniPC"},
                                                             {"LCMScheduler", "LCM"},
                                                             {"FlowMatchLCMScheduler", "LCM"}};
  const std::string name = config.value("_class_name", std::string());
  const SamplerClass* sampler = find_sampler(name);
  const std::string plain = sampler ? sampler->name : name;
  const bool sde = config.value("algorithm_type", std::string()).starts_with("sde");
  SamplerTitle out{plain, ""};
  if (plain == "DPMSolverMultistepScheduler")
    out.sampler = fmt::format("DPM++ {}M{}{}", config.value("solver_order", 2), sde ? " SDE" : "",
                              sde && config.value("solver_type", std::string()) == "heun" ? " Heun" : "");
  else if (const auto title = kTitles.find(plain); title != kTitles.end())
    out.sampler = title->second;
  const std::string kind = sigma_kind(config);
  for (const SigmaScheduleTitle& s : sigma_schedule_titles())
    if (kind == s.name && kind != "training") out.schedule = s.title;
  return out;
}

std::string automatic_schedule(const std::string& name) {
  constexpr const char *kKarras[] = {"dpmpp_2m",       "dpmpp_sde", "dpmpp_2s_ancestral",
                                     "dpm2_ancestral", "dpm2",      "restart"},
                       *kExponential[] = {"dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde"};
  if (std::ranges::find(kKarras, name) != std::end(kKarras)) return "karras";
  return std::ranges::find(kExponential, name) != std::end(kExponential) ? "exponential" : "";
}

const std::vector<SigmaScheduleTitle>& sigma_schedule_titles() {
  static const std::vector<SigmaScheduleTitle> all = {{"training", "Uniform", "Uniform"},
                                                      {"karras", "Karras", "Karras"},
                                                      {"exponential", "Exponential", "Exponential"},
                                                      {"beta", "Beta", "Beta"},
                                                      {"kl_optimal", "KL Optimal", "KL Optimal"},
                                                      {"simple", "Simple", "Simple"},
                                                      {"sgm_uniform", "SGM Uniform", "SGM Uniform"},
                                                      {"ays_sd15", "Align Your Steps", "Align Your Steps"},
                                                      {"ays_sdxl", "Align Your Steps", "Align Your Steps XL"},
                                                      {"ays_svd", "Align Your Steps", "Align Your Steps SVD"},
                                                      {"gits", "GITS", "GITS"}};
  return all;
}

bool steps_over_timesteps(const std::string& name) {
  constexpr const char* kNames[] = {"ddpm", "ddim", "pndm", "lcm", "tcd"};
  return std::ranges::find(kNames, name) != std::end(kNames);
}

std::string schedule_named(const std::string& title, bool two_text_encoders) {
  static const std::map<std::string, std::string> kOthers = {
      {"normal", "training"}, {"sgmuniform", "sgm_uniform"}, {"align_your_steps_gits", "gits"}};
  const std::string word = spelled(title);
  if (word == "align_your_steps") return two_text_encoders ? "ays_sdxl" : "ays_sd15";
  if (const auto other = kOthers.find(word); other != kOthers.end()) return other->second;
  for (const SigmaScheduleTitle& s : sigma_schedule_titles())
    if (word == s.name || word == spelled(s.label)) return s.name;
  return "";
}

bool is_unsupported_sampler(const std::string& name) {
  return std::ranges::find(kMissing, spelled(name)) != std::end(kMissing);
}

void choose_sampler(json& config, const std::string& requested, const std::set<std::string>& fixed) {
  const bool flow = is_flow_matching(config);
  Choice chosen = find(sampler_name(requested));
  if (flow && chosen.word && chosen.word->flow_word) chosen = find(chosen.word->flow_word);
  const SamplerClass* sampler = chosen.word ? chosen.sampler : find_sampler(requested);
  check(sampler, Code::invalid_config, "scheduler is '{}'; expected one of: {}", requested,
        nearest_first(requested, sampler_names()));
  check(sampler->models != SamplerClass::noise || !flow, Code::invalid_config,
        "scheduler is '{}', which samples models that predict noise; this is a flow-matching model; try {}", requested,
        words_for(true));
  check(sampler->models != SamplerClass::flow || flow, Code::invalid_config,
        "scheduler is '{}', which samples flow-matching models; this one predicts {}; try {}", requested,
        config.value("prediction_type", "epsilon"), words_for(false));
  config["_class_name"] = sampler->name;
  if (!chosen.word) return;
  json fields = {{"use_karras_sigmas", false},
                 {"use_exponential_sigmas", false},
                 {"use_beta_sigmas", false},
                 {"use_lu_lambdas", false},
                 {"use_flow_sigmas", flow && sampler->models != SamplerClass::flow}};
  if (flow) {
    fields["prediction_type"] = "flow_prediction";
    // The file's shift, under this sampler's name for it.
    for (const SamplerClass& other : sampler_classes())
      if (sampler->shift && other.shift && config.contains(other.shift) && !config.contains(sampler->shift))
        fields[sampler->shift] = config[other.shift];
  }
  if (!config.contains("clip_sample")) fields["clip_sample"] = false;
  fields.update(chosen.word->fields);
  for (const auto& [name, value] : fields.items())
    if (!fixed.contains(name)) config[name] = value;
}

}  // namespace md
