#include "maxdiffusion/lora/lora_metadata.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/lora/adapter.h"
#include "maxdiffusion/lora/layer_pattern.h"

namespace md {
namespace {

using nlohmann::json;

constexpr const char* kMetadataKey = "lora_adapter_metadata";

json parse(const std::string& where, const std::string& text) {
  json j = parse_json_or_discard(text);
  check(j.is_object(), Code::invalid_config, "{}: expected a JSON object, found {}", where, text.substr(0, 80));
  return j;
}

bool is_set(const json& config, const char* key) {
  auto it = config.find(key);
  return it != config.end() && !it->empty() && *it != json(false) && *it != json("none");
}

/// Options whose effect is not that of the kinds of adapters that there are.
void refuse(const std::string& where, const json& config) {
  const json method = config.value("peft_type", json("LORA"));
  check(std::ranges::any_of(adapters(), [&](const Adapter* a) { return method == json(a->peft_type()); }),
        Code::invalid_config, "{}: 'peft_type' is {}, which is not supported; LORA, LOHA, LOKR and IA3 are", where,
        method.dump());
  for (const char* key :
       {"use_qalora", "use_bdlora", "lora_bias", "bias", "fan_in_fan_out", "kasa_config", "monteclora_config",
        "arrow_config", "alora_invocation_tokens", "layer_replication", "modules_to_save", "trainable_token_indices"})
    check(!is_set(config, key), Code::invalid_config, "{}: '{}' is {}, which is not supported; plain LoRA is", where,
          key, config.value(key, json()).dump());
  const json start = config.value("init_lora_weights", json());
  if (!start.is_string()) return;
  for (const char* method : {"pissa", "olora", "corda", "loftq"})
    check(!start.get<std::string>().starts_with(method), Code::invalid_config,
          "{}: 'init_lora_weights' is {}, which also changes the base weights; convert the file to plain LoRA with "
          "PEFT",
          where, start.dump());
}

}  // namespace

struct LoraMetadata::Component {
  Component(const std::string& where, const json& config) {
    refuse(where, config);
    try {
      for (const char* key : {"lora_alpha", "alpha"})
        if (auto a = config.find(key); a != config.end() && !a->is_null()) alpha = a->get<double>();
      const json by_pattern = config.value("alpha_pattern", json::object());
      for (const auto& [key, value] : by_pattern.items()) patterns.push_back({LayerPattern(key), value.get<double>()});
      rank_stabilized = is_set(config, "use_rslora");
      const json names = config.value("feedforward_modules", json());
      if (names.is_string()) input_scaled.emplace_back(names.get<std::string>());
      if (names.is_array())
        for (const json& name : names) input_scaled.emplace_back(name.get<std::string>());
    } catch (const json::exception& e) {
      fail(Code::invalid_config, "{}: {}", where, e.what());
    } catch (const std::regex_error& e) {
      fail(Code::invalid_config, "{}: alpha_pattern: {}", where, e.what());
    }
  }
  std::optional<double> alpha;  // none: PEFT's default of 8
  std::vector<std::pair<LayerPattern, double>> patterns;
  bool rank_stabilized = false;
  std::vector<LayerPattern> input_scaled;
};

LoraMetadata LoraMetadata::read(const std::string& path, const std::map<std::string, std::string>& file_metadata) {
  LoraMetadata m;
  if (auto it = file_metadata.find(kMetadataKey); it != file_metadata.end()) {
    const std::string where = fmt::format("LoRA '{}': {}", path, kMetadataKey);
    std::map<std::string, json> apart;  // "unet.lora_alpha" → unet: lora_alpha
    const json all = parse(where, it->second);
    for (const auto& [key, value] : all.items()) {
      const size_t dot = key.find('.');
      apart[dot == key.npos ? "" : key.substr(0, dot)][key.substr(dot + 1)] = value;
    }
    for (const auto& [component, config] : apart)
      m.components_[component] = std::make_shared<Component>(where + " of " + component, config);
  }
  // Without PEFT's JSON, texts of the header: "lora_alpha" or "transformer.lora_alpha".
  if (m.components_.empty())
    for (const char* name : {"ss_network_alpha", "alpha", "network_alpha", "lora_alpha"})  // the last one counts
      for (const auto& [key, value] : file_metadata) {
        const size_t dot = key.rfind('.');
        if (key.substr(dot == key.npos ? 0 : dot + 1) != name) continue;
        const json alpha = parse_json_or_discard(value);
        if (value == "None" || value == "null" || (alpha.is_number() && alpha.get<double>() == 0))
          continue;                        // the rank
        if (value == "Dynamic") continue;  // tensors have it
        if (!alpha.is_number()) {
          log_warning("LoRA '{}': {} of the metadata is '{}', not a number; it is not used", path, key, value);
          continue;
        }
        m.components_[dot == key.npos ? "" : key.substr(0, dot)] =
            std::make_shared<Component>(path, json{{"lora_alpha", alpha}});
      }
  m.path_ = path;
  const std::filesystem::path file(path), config = file.parent_path() / "adapter_config.json";
  if (file.filename() == "adapter_model.safetensors" && exists(config.string()))
    m.components_[""] =
        std::make_shared<Component>(config.string(), parse(config.string(), read_file(config.string())));
  return m;
}

const LoraMetadata::Component* LoraMetadata::find(const std::string& component) const {
  auto it = components_.find(component);
  if (it == components_.end()) it = components_.find("");
  return it == components_.end() ? nullptr : it->second.get();
}

void LoraMetadata::warn(const std::string& doubt) const {
  if (!warned_) log_warning("LoRA '{}': {}", path_, doubt);
  warned_ = true;
}

bool LoraMetadata::covers(const std::string& component) const { return find(component) != nullptr; }

double LoraMetadata::alpha(const std::string& component, const std::string& module, int64_t rank) const {
  const Component* c = find(component);
  check(c, Code::internal, "LoRA: no metadata of {}", component);
  double alpha = c->alpha.value_or(8);
  for (const auto& [pattern, value] : c->patterns)
    if (pattern.matches(module)) {
      alpha = value;
      break;
    }
  return c->rank_stabilized ? alpha * std::sqrt(static_cast<double>(rank)) : alpha;
}

bool LoraMetadata::scales_input(const std::string& component, const std::string& module) const {
  const Component* c = find(component);
  return c && std::ranges::any_of(c->input_scaled, [&](const LayerPattern& p) { return p.matches(module); });
}

namespace {

/// r, alpha under its name, and their exceptions.
json strengths_json(const std::map<std::string, LoraStrength>& strengths, const char* alpha_key) {
  std::map<int64_t, size_t> ranks;
  std::map<double, size_t> alphas;
  for (const auto& [module, s] : strengths) ++ranks[s.rank], ++alphas[s.alpha];
  auto commonest = [](const auto& counts) {
    return std::max_element(counts.begin(), counts.end(), [](auto& a, auto& b) { return a.second < b.second; })->first;
  };
  auto number = [](double v) {
    const bool whole = v == std::floor(v) && std::abs(v) < 1e15;
    return whole ? json(static_cast<int64_t>(v)) : json(v);
  };
  const int64_t rank = commonest(ranks);
  const double alpha = commonest(alphas);
  json targets = json::array(), rank_pattern = json::object(), alpha_pattern = json::object();
  for (const auto& [module, s] : strengths) {
    targets.push_back(module);
    if (s.rank != rank) rank_pattern[module] = s.rank;
    if (s.alpha != alpha) alpha_pattern[module] = number(s.alpha);
  }
  return {{"r", rank},
          {alpha_key, number(alpha)},
          {"rank_pattern", rank_pattern},
          {"alpha_pattern", alpha_pattern},
          {"target_modules", targets}};
}

}  // namespace

std::string lora_metadata_json(const std::map<std::string, std::map<std::string, LoraStrength>>& modules, bool dora) {
  json all = json::object();
  for (const auto& [component, strengths] : modules) {
    json config = strengths_json(strengths, "lora_alpha");
    config["use_dora"] = dora;
    config["lora_bias"] = false;
    for (const auto& [key, value] : config.items()) all[component + "." + key] = value;
  }
  return all.dump(2);
}

std::string peft_config_json(const Adapter& kind, const std::map<std::string, LoraStrength>& strengths,
                             const std::vector<std::string>& input_scaled, std::optional<LokrSizes> lokr,
                             const std::string& component) {
  json config = strengths_json(strengths, "alpha");
  if (!kind.has_rank()) {
    config = {{"target_modules", config.at("target_modules")}, {"feedforward_modules", input_scaled}};
  } else {
    config["use_effective_conv2d"] = false;
  }
  if (lokr) config["decompose_factor"] = lokr->factor, config["decompose_both"] = lokr->decompose_both;
  if (component.empty()) {
    config["peft_type"] = kind.peft_type();
    config["inference_mode"] = true;
    return config.dump(2);
  }
  json all = json::object();
  for (const auto& [key, value] : config.items()) all[component + "." + key] = value;
  return all.dump(2);
}

}  // namespace md
