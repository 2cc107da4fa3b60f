#include "maxdiffusion/lora/lora_targets.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Respelling = std::pair<std::string, std::string>;

/// `name` with the suffix `from` replaced; it must start at a component of the name.
std::optional<std::string> end_respelled(const std::string& name, const Respelling& r) {
  if (name == r.first) return r.second;
  if (!name.ends_with("." + r.first)) return std::nullopt;
  return name.substr(0, name.size() - r.first.size()) + r.second;
}
/// Old diffusers' LoRA attention processors name the text encoders' projections like the UNet's, without an index.
const std::vector<Respelling> kOldAttention = {
    {"to_out.0", "to_out"}, {"q_proj", "to_q"}, {"k_proj", "to_k"}, {"v_proj", "to_v"}, {"out_proj", "to_out"}};

/// `module` and its other names. `originals`: names in other programs' files.
std::vector<std::string> names_of(const std::string& module, const std::vector<std::string>& originals) {
  std::vector<std::string> names = {module};
  names.insert(names.end(), originals.begin(), originals.end());
  // transformers 5 names CLIPTextModel's modules without this prefix.
  if (module.starts_with("text_model.")) names.push_back(module.substr(module.find('.') + 1));
  for (size_t i = 0, n = names.size(); i < n; ++i)
    for (const Respelling& old : kOldAttention)
      if (auto name = end_respelled(names[i], old)) names.push_back(*name);
  return names;
}

/// "blocks_12_attn" → "blocks_#_attn".
std::string without_numbers(const std::string& name) {
  std::string out;
  for (const char c : name)
    if (c < '0' || c > '9')
      out += c;
    else if (!out.ends_with('#'))
      out += '#';
  return out;
}

}  // namespace

std::string underscored(std::string name) {
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

LoraTargets::LoraTargets(const ParamTable& params, LoraNames names) : names_(std::move(names)) {
  for (const Param& p : params.params()) {
    if (p.path.ends_with(".lora_A.weight") || p.path.ends_with(".lora_B.weight")) continue;
    Dims dims = p.shape.dims;
    if (p.stacked > 0) dims.erase(dims.begin());
    for (int64_t i = 0; i < std::max<int64_t>(p.stacked, 1); ++i)
      targets_.push_back({p.model, p.stacked > 0 ? layer_path(p.path, i) : p.path, dims});
  }
  for (size_t index = 0; index < targets_.size(); ++index) {
    const LoraTarget& t = targets_[index];
    const size_t dot = t.path.rfind('.');
    const std::string end = dot == t.path.npos ? "" : t.path.substr(dot);
    std::vector<std::string> all = {t.path}, originals;
    if (const auto others = names_.others.find(t.component); others != names_.others.end() && others->second.aliases)
      for (const WeightAlias& other : others->second.aliases(t.path)) {
        if (other.transposed) continue;  // no LoRA files have transposed matrices
        const std::string name = other.full_name();
        if (other.parts > 1) {
          add(t.component, name, {index, other.part, other.parts});
          continue;
        }
        all.push_back(name);
        if (!end.empty() && name.ends_with(end)) originals.push_back(name.substr(0, name.size() - end.size()));
      }
    if (!end.empty())
      for (const std::string& module : names_of(t.path.substr(0, dot), originals)) all.push_back(module + end);
    for (const std::string& name : all) add(t.component, name, {index, {0}, 1});
  }
}

void LoraTargets::add(const std::string& component, const std::string& name, Place place) {
  std::vector<Place>& same_name = by_name_[component][underscored(name)];
  if (same_name.empty()) without_numbers_[component].insert(without_numbers(underscored(name)));
  for (const Place& other : same_name) {
    if (targets_[other.target].path == targets_[place.target].path) return;
    check(other.parts > 1 && other.parts == place.parts, Code::internal, "{}: '{}' and '{}' have the same name {}",
          component, targets_[other.target].path, targets_[place.target].path, name);
  }
  same_name.push_back(std::move(place));
}

std::vector<LoraPlace> LoraTargets::find(const std::string& component, std::string name,
                                         const std::string& denoiser) const {
  name = underscored(std::move(name));
  const std::vector<Place>* only = nullptr;
  for (const auto& [model, names] : by_name_) {
    const auto it = names.find(name);
    if (it == names.end() || !means(component, model, denoiser)) continue;
    if (only) return {};
    only = &it->second;
  }
  std::vector<LoraPlace> out;
  if (only)
    for (const Place& p : *only) out.push_back({&targets_[p.target], p.part, p.parts});
  return out;
}

bool LoraTargets::means(const std::string& component, const std::string& model, const std::string& denoiser) const {
  if (!component.empty()) return model == component;
  return model == denoiser || !std::ranges::count(names_.denoisers, model);
}

bool LoraTargets::is_of_other_block(const std::string& component, std::string name, const std::string& denoiser) const {
  name = without_numbers(underscored(std::move(name)));
  return std::ranges::any_of(without_numbers_, [&](const auto& of_model) {
    return means(component, of_model.first, denoiser) && of_model.second.contains(name);
  });
}

std::vector<std::string> LoraTargets::components() const {
  std::vector<std::string> out;
  for (const auto& [model, names] : by_name_) out.push_back(model);
  return out;
}

}  // namespace md
