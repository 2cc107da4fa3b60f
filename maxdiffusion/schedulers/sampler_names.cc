#include "maxdiffusion/schedulers/sampler_names.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

using nlohmann::json;

constexpr const char* kMissing[] = {"heun",
                                    "heunpp2",
                                    "dpm2",
                                    "dpm_2",
                                    "dpm2_a",
                                    "dpm_2_ancestral",
                                    "kdpm2",
                                    "dpm_fast",
                                    "dpm_adaptive",
                                    "dpmpp_sde",
                                    "dpmpp_sde_karras",
                                    "dpmpp_2s_a",
                                    "dpmpp_2s_ancestral",
                                    "dpmpp_3m_sde",
                                    "lcm",
                                    "tcd",
                                    "deis",
                                    "ipndm",
                                    "edm_euler",
                                    "sa_solver",
                                    "er_sde",
                                    "res_multistep",
                                    "restart",
                                    "ddim_parallel",
                                    "consistency"};

/// "DPM++ 2M Karras" → "dpmpp_2m_karras".
std::string spelled(const std::string& given) {
  std::string out;
  for (const char c : given) {
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

/// By name or alias, normalized; null if unknown.
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

std::string sampler_name(const std::string& given) {
  if (std::ranges::count(scheduler_names(), given) > 0) return given;
  const SamplerName* word = find(spelled(given)).word;
  return word ? word->word : "";
}

bool is_unsupported_sampler(const std::string& given) {
  return std::ranges::find(kMissing, spelled(given)) != std::end(kMissing);
}

void choose_sampler(json& config, const std::string& given, const std::set<std::string>& fixed) {
  const bool flow = is_flow_matching(config);
  Choice chosen = find(sampler_name(given));
  if (flow && chosen.word && chosen.word->flow_word) chosen = find(chosen.word->flow_word);
  const SamplerClass* sampler = chosen.word ? chosen.sampler : find_sampler(given);
  check(sampler, Code::invalid_config, "scheduler is '{}', which is not a sampler", given);
  check(sampler->models != SamplerClass::noise || !flow, Code::invalid_config,
        "scheduler is '{}', which samples models that predict noise; this is a flow-matching model; try {}", given,
        words_for(true));
  check(sampler->models != SamplerClass::flow || flow, Code::invalid_config,
        "scheduler is '{}', which samples flow-matching models; this one predicts {}; try {}", given,
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
    // The shift of the file's sampler, under this one's name for it.
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
