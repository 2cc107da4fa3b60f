#include "maxdiffusion/schedulers/sampler_words.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {
namespace {

using nlohmann::json;

constexpr const char *kFlowEuler = "FlowMatchEulerDiscreteScheduler", *kDpm = "DPMSolverMultistepScheduler",
                     *kUniPc = "UniPCMultistepScheduler";

struct Sampler {
  const char* word;
  const char* class_name;
  json members = json::object();
};

json dpmpp(int order, bool sde = false, bool karras = false) {
  return {{"algorithm_type", sde ? "sde-dpmsolver++" : "dpmsolver++"},
          {"solver_order", order},
          {"use_karras_sigmas", karras}};
}

const std::vector<Sampler>& samplers() {
  static const json karras = {{"use_karras_sigmas", true}};
  static const std::vector<Sampler> all = {
      {"ddpm", "DDPMScheduler"},
      {"ddim", "DDIMScheduler"},
      {"pndm", "PNDMScheduler", {{"skip_prk_steps", true}}},
      {"lms", "LMSDiscreteScheduler"},
      {"lms_karras", "LMSDiscreteScheduler", karras},
      {"euler", "EulerDiscreteScheduler"},
      {"euler_karras", "EulerDiscreteScheduler", karras},
      {"flow_euler", kFlowEuler},
      {"dpmpp_2m", kDpm, dpmpp(2)},
      {"dpmpp_2m_karras", kDpm, dpmpp(2, false, true)},
      {"dpmpp_2m_sde", kDpm, dpmpp(2, true)},
      {"dpmpp_2m_sde_karras", kDpm, dpmpp(2, true, true)},
      {"dpmpp_3m", kDpm, dpmpp(3)},
      {"unipc", kUniPc},
      {"unipc_karras", kUniPc, karras},
  };
  return all;
}

/// Other words for the same, in the spelling that `spelled` gives.
constexpr std::pair<const char*, const char*> kOthers[] = {
    {"dpmpp", "dpmpp_2m"}, {"dpmpp_karras", "dpmpp_2m_karras"}, {"dpmsolverpp", "dpmpp_2m"},
    {"plms", "pndm"},      {"flow_match_euler", "flow_euler"},  {"flowmatch_euler", "flow_euler"},
    {"uni_pc", "unipc"},
};
constexpr const char* kMissing[] = {"euler_a",
                                    "euler_ancestral",
                                    "heun",
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

const Sampler* find(const std::string& word) {
  const auto found = std::ranges::find(samplers(), word, &Sampler::word);
  return found == samplers().end() ? nullptr : &*found;
}

}  // namespace

std::vector<std::string> sampler_words() {
  std::vector<std::string> words;
  for (const Sampler& s : samplers()) words.emplace_back(s.word);
  return words;
}

std::string sampler_word(const std::string& given) {
  const std::vector<std::string> classes = scheduler_names();
  if (std::ranges::count(classes, given) > 0) return given;
  std::string word = spelled(given);
  for (const auto& [other, same] : kOthers)
    if (word == other) word = same;
  return find(word) ? word : "";
}

bool is_missing_sampler(const std::string& given) {
  return std::ranges::find(kMissing, spelled(given)) != std::end(kMissing);
}

void choose_sampler(json& config, const std::string& given, const std::set<std::string>& fixed) {
  const bool flow = flows(config);
  std::string word = sampler_word(given);
  if (flow && word == "euler") word = "flow_euler";
  const Sampler* sampler = find(word);
  const std::string class_name = sampler ? sampler->class_name : word;
  const bool takes_flow = class_name == kFlowEuler || class_name == kDpm || class_name == kUniPc;
  check(takes_flow || !flow, Code::invalid_config,
        "scheduler is '{}', which samples models that predict noise, but this one flows; try flow_euler, dpmpp_2m or "
        "unipc",
        given);
  check(class_name != kFlowEuler || flow, Code::invalid_config,
        "scheduler is '{}', which samples models that flow, but this one predicts {}; try euler, ddim, dpmpp_2m or "
        "unipc",
        given, config.value("prediction_type", "epsilon"));
  config["_class_name"] = class_name;
  if (!sampler) return;
  json members = {{"use_karras_sigmas", false},
                  {"use_exponential_sigmas", false},
                  {"use_beta_sigmas", false},
                  {"use_lu_lambdas", false},
                  {"use_flow_sigmas", flow && class_name != kFlowEuler}};
  if (flow) {
    members["prediction_type"] = "flow_prediction";
    // Each class has a member of its own for the shift.
    for (const auto& [from, to] : {std::pair{"shift", "flow_shift"}, {"flow_shift", "shift"}})
      if (config.contains(from) && !config.contains(to)) members[to] = config[from];
  }
  if (!config.contains("clip_sample")) members["clip_sample"] = false;
  members.update(sampler->members);
  for (const auto& [name, value] : members.items())
    if (!fixed.contains(name)) config[name] = value;
}

}  // namespace md
