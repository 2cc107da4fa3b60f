#include "maxdiffusion/lora/lora_blocks.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <regex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/split_at_commas.h"

namespace md {
namespace {

constexpr const char* kText = "BASE";

/// The block of a UNet that a weight's original name says: "IN04", "M00", "OUT11"; empty: none.
std::string block_of_original(const std::string& name) {
  static const std::regex form("(input|output|middle)_block(?:s\\.(\\d+))?\\.");
  std::smatch m;
  if (!std::regex_search(name, m, form)) return "";
  return m[1] == "middle" ? "M00" : fmt::format("{}{:0>2}", m[1] == "input" ? "IN" : "OUT", m[2].str());
}

/// The block of a transformer: "transformer_blocks.3"; empty: none. Sequences of single layers are no blocks.
std::string block_of_path(const std::string& path) {
  static const std::regex form("(\\w+\\.\\d+)\\.\\w+\\..+");
  std::smatch m;
  return std::regex_match(path, m, form) ? m[1].str() : "";
}

/// Weights for SD 1.x by their names in the web UI's default presets.
const std::map<std::string, std::string>& presets() {
  static const std::map<std::string, std::string> all = {{"INS", "11110000000000000"},   {"IND", "10001110000000000"},
                                                         {"INALL", "11111110000000000"}, {"MIDD", "10001111111100000"},
                                                         {"OUTD", "10000000111100000"},  {"OUTS", "10000000000011111"},
                                                         {"OUTALL", "10000000111111111"}};
  return all;
}

std::optional<double> number_in(const std::string& text) {
  double value = 0;
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(value) ? std::optional(value)
                                                                                          : std::nullopt;
}

/// "BASE, 30 layers".
std::string summary(const std::vector<std::string>& blocks) {
  std::vector<std::pair<std::string, int64_t>> runs;
  for (const std::string& b : blocks) {
    const std::string sequence = b.substr(0, b.find('.'));
    if (runs.empty() || runs.back().first != sequence) runs.emplace_back(sequence, 0);
    runs.back().second += b.find('.') == b.npos ? 0 : 1;
  }
  std::vector<std::string> texts;
  for (const auto& [name, n] : runs) texts.push_back(n > 0 ? fmt::format("{} {}", n, name) : name);
  return fmt::format("{} ({})", blocks.size(), fmt::join(texts, ", "));
}

}  // namespace

LoraBlocks::LoraBlocks(const ParamTable& params, const LoraNames& names, const std::vector<std::string>& text_encoders,
                       bool with_ends) {
  std::vector<std::pair<std::string, std::string>> weights;  // component, path
  for (const Param& p : params.params())
    for (int64_t i = 0; i < std::max<int64_t>(p.stacked, 1); ++i)
      weights.emplace_back(p.model, p.stacked > 0 ? layer_path(p.path, i) : p.path);
  for (const std::string& component : text_encoders)
    for (const auto& [model, path] : weights)
      if (model == component) add(component, path, with_ends ? component : kText);
  for (const std::string& denoiser : names.denoisers) {
    const auto original = names.others.find(denoiser);
    std::map<std::string, bool> attends;  // by block of a UNet
    bool before = true;                   // the blocks
    for (const auto& [model, path] : weights) {
      if (model != denoiser) continue;
      std::string block;
      if (original != names.others.end() && original->second.aliases)
        for (const WeightAlias& alias : original->second.aliases(path))
          if (block.empty()) block = block_of_original(alias.name);
      if (!block.empty()) {
        attends[block] |= block == "M00" || path.find(".attentions.") != path.npos;
      } else if (block = block_of_path(path); !block.empty()) {
        before = false;
      } else if (with_ends) {
        block = before ? "the layers before" : "the layers behind";
      }
      add(denoiser, path, block);
    }
    if (attends.empty()) continue;
    // In the order of their names, IN, M, OUT. The text encoders have a weight even where there are none.
    blocks_ = attending_ = {kText};
    for (const auto& [block, its] : attends) {
      blocks_.push_back(block);
      if (its) attending_.push_back(block);
    }
  }
}

void LoraBlocks::add(const std::string& component, const std::string& path, const std::string& block) {
  block_of_[component][path] = block;
  if (!block.empty() && std::ranges::find(blocks_, block) == blocks_.end()) blocks_.push_back(block);
}

std::map<std::string, std::map<std::string, double>> LoraBlocks::factors(const std::string& list) const {
  std::vector<std::string> texts = split_at_commas({list});
  const std::string name = texts.size() == 1 ? texts[0] : "";
  if (name == "ALL" || name == "FLUXALL" || name == "NONE" || name == "ALL0.5")
    texts.assign(blocks_.size(), name == "NONE" ? "0" : name == "ALL0.5" ? "0.5" : "1");
  if (const auto preset = presets().find(name); preset != presets().end()) {
    texts.clear();
    for (const char c : preset->second) texts.emplace_back(1, c);
  }
  const std::vector<std::string>& order =
      !attending_.empty() && texts.size() == attending_.size() ? attending_ : blocks_;
  std::vector<std::string> names = {"ALL", "NONE", "ALL0.5"};
  for (const auto& [preset, weights] : presets()) names.push_back(preset);
  std::map<std::string, double> of_block;
  for (const std::string& block : blocks_) of_block[block] = 0;
  of_block[""] = 1;
  check(texts.size() == order.size(), Code::invalid_config, "lora_block_weights '{}' are {}; expected {}{}", list,
        texts.size(), summary(blocks_), attending_.empty() ? "" : " or " + summary(attending_));
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto value = number_in(texts[i]);
    check(value.has_value(), Code::invalid_config, "lora_block_weights has '{}'; expected numbers, or one of: {}",
          texts[i], fmt::join(names, ", "));
    of_block[order[i]] = *value;
  }
  std::map<std::string, std::map<std::string, double>> out;
  for (const auto& [component, paths] : block_of_)
    for (const auto& [path, block] : paths) out[component][path] = of_block.at(block);
  return out;
}

}  // namespace md
