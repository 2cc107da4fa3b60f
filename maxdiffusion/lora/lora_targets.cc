#include "maxdiffusion/lora/lora_targets.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Respelling = std::pair<std::string, std::string>;

/// `name` with `from` at its end (or at its beginning) replaced, where a part of the name begins (or ends).
std::optional<std::string> end_respelled(const std::string& name, const Respelling& r) {
  if (name == r.first) return r.second;
  if (!name.ends_with("." + r.first)) return std::nullopt;
  return name.substr(0, name.size() - r.first.size()) + r.second;
}
std::optional<std::string> start_respelled(const std::string& name, const Respelling& r) {
  if (name == r.first) return r.second;
  if (!name.starts_with(r.first + ".")) return std::nullopt;
  return r.second + name.substr(r.first.size());
}

/// What the original UNet calls the blocks of diffusers' UNet, given all its modules: input and output blocks are
/// counted through the levels, each resnet and each downsampler being one; an upsampler shares the block of the level's
/// last resnet.
std::vector<Respelling> original_blocks(const std::set<std::string>& modules) {
  auto holds = [&](const std::string& block) {
    auto it = modules.lower_bound(block + ".");
    return it != modules.end() && it->starts_with(block + ".");
  };
  std::vector<Respelling> out = {{"conv_in", "input_blocks.0.0"},
                                 {"conv_out", "out.2"},
                                 {"time_embedding.linear_1", "time_embed.0"},
                                 {"time_embedding.linear_2", "time_embed.2"},
                                 {"add_embedding.linear_1", "label_emb.0.0"},
                                 {"add_embedding.linear_2", "label_emb.0.2"},
                                 {"mid_block.resnets.0", "middle_block.0"},
                                 {"mid_block.attentions.0", "middle_block.1"},
                                 {"mid_block.resnets.1", "middle_block.2"}};
  int next = 1;
  for (int level = 0; holds(fmt::format("down_blocks.{}", level)); ++level) {
    const std::string block = fmt::format("down_blocks.{}", level);
    for (int i = 0; holds(fmt::format("{}.resnets.{}", block, i)); ++i, ++next) {
      out.push_back({fmt::format("{}.resnets.{}", block, i), fmt::format("input_blocks.{}.0", next)});
      out.push_back({fmt::format("{}.attentions.{}", block, i), fmt::format("input_blocks.{}.1", next)});
    }
    if (holds(block + ".downsamplers.0"))
      out.push_back({block + ".downsamplers.0.conv", fmt::format("input_blocks.{}.0.op", next++)});
  }
  next = 0;
  for (int level = 0; holds(fmt::format("up_blocks.{}", level)); ++level) {
    const std::string block = fmt::format("up_blocks.{}", level);
    for (int i = 0; holds(fmt::format("{}.resnets.{}", block, i)); ++i, ++next) {
      out.push_back({fmt::format("{}.resnets.{}", block, i), fmt::format("output_blocks.{}.0", next)});
      out.push_back({fmt::format("{}.attentions.{}", block, i), fmt::format("output_blocks.{}.1", next)});
    }
    out.push_back({block + ".upsamplers.0",
                   fmt::format("output_blocks.{}.{}", next - 1, holds(block + ".attentions.0") ? 2 : 1)});
  }
  return out;
}

const std::vector<Respelling> kOriginalResnet = {{"conv1", "in_layers.2"},
                                                 {"conv2", "out_layers.3"},
                                                 {"time_emb_proj", "emb_layers.1"},
                                                 {"conv_shortcut", "skip_connection"}};
/// LoRA attention processors of old diffusers name the text encoders' projections as the UNet's, without an index.
const std::vector<Respelling> kOldAttention = {
    {"to_out.0", "to_out"}, {"q_proj", "to_q"}, {"k_proj", "to_k"}, {"v_proj", "to_v"}, {"out_proj", "to_out"}};

/// Other names of a module. `blocks`: original_blocks() of its UNet, or none.
std::vector<std::string> names_of(const std::string& module, const std::vector<Respelling>& blocks) {
  std::vector<std::string> names = {module};
  for (const Respelling& block : blocks)
    if (auto original = start_respelled(module, block)) {
      for (const Respelling& layer : kOriginalResnet)
        if (auto inner = end_respelled(*original, layer)) original = inner;
      names.push_back(*original);
      break;
    }
  // transformers 5 names CLIPTextModel's modules without it.
  if (module.starts_with("text_model.")) names.push_back(module.substr(module.find('.') + 1));
  for (size_t i = 0, n = names.size(); i < n; ++i)
    for (const Respelling& old : kOldAttention)
      if (auto name = end_respelled(names[i], old)) names.push_back(*name);
  return names;
}

}  // namespace

std::string underscored(std::string name) {
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

LoraTargets::LoraTargets(const ParamTable& params, LoraNames names) : names_(std::move(names)) {
  std::set<std::string> unet;
  for (const Param& p : params.params()) {
    if (p.path.ends_with(".lora_A.weight") || p.path.ends_with(".lora_B.weight")) continue;
    Dims dims = p.shape.dims;
    if (p.stacked > 0) dims.erase(dims.begin());
    for (int64_t i = 0; i < std::max<int64_t>(p.stacked, 1); ++i) {
      targets_.push_back({p.model, p.stacked > 0 ? layer_path(p.path, i) : p.path, dims});
      if (p.model == "unet") unet.insert(targets_.back().path);
    }
  }
  const std::vector<Respelling> blocks = original_blocks(unet);
  for (size_t index = 0; index < targets_.size(); ++index) {
    const LoraTarget& t = targets_[index];
    const size_t dot = t.path.rfind('.');
    std::vector<std::string> all = {t.path};
    if (dot != t.path.npos)
      for (const std::string& module :
           names_of(t.path.substr(0, dot), t.component == "unet" ? blocks : std::vector<Respelling>()))
        all.push_back(module + t.path.substr(dot));
    if (const auto others = names_.others.find(t.component); others != names_.others.end() && others->second)
      for (const std::string& name : others->second(t.path)) all.push_back(name);
    for (const std::string& name : all) {
      const LoraTarget& there = targets_[by_name_[t.component].emplace(underscored(name), index).first->second];
      check(there.path == t.path, Code::internal, "{}: '{}' and '{}' are both called {}", t.component, there.path,
            t.path, name);
    }
  }
}

const LoraTarget* LoraTargets::find(const std::string& component, std::string name, const std::string& denoiser) const {
  name = underscored(std::move(name));
  const LoraTarget* only = nullptr;
  for (const auto& [model, names] : by_name_) {
    const bool meant =
        component.empty() ? model == denoiser || !std::ranges::count(names_.denoisers, model) : model == component;
    const auto it = names.find(name);
    if (!meant || it == names.end()) continue;
    if (only) return nullptr;
    only = &targets_[it->second];
  }
  return only;
}

std::vector<std::string> LoraTargets::components() const {
  std::vector<std::string> out;
  for (const auto& [model, names] : by_name_) out.push_back(model);
  return out;
}

}  // namespace md
