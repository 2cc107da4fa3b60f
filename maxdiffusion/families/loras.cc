#include "maxdiffusion/families/loras.h"

#include <algorithm>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/lora/lora_blocks.h"

namespace md {

std::vector<std::string> lora_components(const Family& family) {
  std::vector<std::string> components = family.spec().text_components();
  for (const std::string& denoiser : family.spec().denoisers) components.push_back(denoiser);
  return components;
}

LoraNames lora_names(const ModelFolder& folder, const Family& family) {
  LoraNames names{.denoisers = family.spec().denoisers};
  for (const auto& [name, component] : folder.components()) names.others[name] = folder.weight_names(name);
  return names;
}

LoraTargets lora_targets(const ModelFolder& folder, const Family& family) {
  return LoraTargets(folder.params(lora_components(family)), lora_names(folder, family));
}

std::vector<ScaledLora> read_loras(const LoraKeys& keys, const ModelFolder& folder, const Family& family,
                                   const LearnedEmbeddings& learned) {
  std::vector<LoraChoice> chosen = chosen_loras(keys);
  for (const char* part : {"", kExpertFolders[0], kExpertFolders[1]})
    for (const char* name :
         {"pytorch_lora_weights", "lora_kohya", "lora_comfyui"})  // the same; the first has not every kind
      if (const std::string file = fmt::format("{}/{}/{}.safetensors", folder.path(), part, name); exists(file)) {
        verify_component(file);
        chosen.insert(chosen.begin(), {file, 1});
        break;
      }
  std::vector<ScaledLora> loras;
  if (chosen.empty()) return loras;
  LoraNames names = lora_names(folder, family);
  names.elsewhere = [&](const std::string& key, const HostArray& a) {
    return is_learned(learned, family.spec(), key, a);
  };
  const LoraTargets targets(folder.params(lora_components(family)), names);
  std::optional<LoraBlocks> blocks;
  const std::vector<std::string> denoisers = family.spec().denoisers;
  for (const LoraChoice& l : chosen) {
    check(!l.denoiser || *l.denoiser < denoisers.size(), Code::invalid_config,
          "lora_config: '{}' is for a second denoiser; this model has one", l.path);
    ScaledLora& lora =
        loras.emplace_back(ScaledLora{.file = read_lora(l.path, targets, l.denoiser ? denoisers[*l.denoiser] : "",
                                                        missing_keys(keys.lora_missing_keys)),
                                      .scale = l.scale});
    lora.steps = l.steps;
    if (!l.block_weights.empty() || l.text_scale) {
      const std::vector<std::string> text_encoders = family.spec().text_components();
      if (!blocks)
        blocks.emplace(folder.params(lora_components(family)), lora_names(folder, family), text_encoders,
                       family.spec().lora.ends_are_blocks);
      lora.scales = blocks->factors(l.block_weights.empty() ? "ALL" : l.block_weights);
      for (auto& [component, factors] : lora.scales)
        for (auto& [path, factor] : factors)
          factor *= std::ranges::count(text_encoders, component) > 0 ? l.text_scale.value_or(l.scale) : l.scale;
    }
    log_info_once("LoRA {} with scale {}{}: {}", l.path, l.scale,
                  (l.text_scale ? fmt::format(", {} for the text encoders", *l.text_scale) : "") +
                      (l.block_weights.empty() ? "" : ", by block " + l.block_weights),
                  summary(lora.file));
  }
  return loras;
}

}  // namespace md
