#include "maxdiffusion/families/loras.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/checksums.h"

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

std::vector<ScaledLora> read_loras(const LoraKeys& keys, const ModelFolder& folder, const Family& family) {
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
  const LoraTargets targets = lora_targets(folder, family);
  const std::vector<std::string> denoisers = family.spec().denoisers;
  for (const LoraChoice& l : chosen) {
    check(!l.denoiser || *l.denoiser < denoisers.size(), Code::invalid_config,
          "lora_config: '{}' is for a second denoiser; this model has one", l.path);
    loras.push_back({read_lora(l.path, targets, l.denoiser ? denoisers[*l.denoiser] : ""), l.scale});
    log_info("LoRA {} with scale {}: {}", l.path, l.scale, summary(loras.back().file));
  }
  return loras;
}

}  // namespace md
