// LoRA files and the models of a folder: what is called what, and which files are added.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/lora/lora_merge.h"

namespace md {

/// Where a checkpoint has the LoRA files of the experts, of Family::denoisers, where a run trains both.
inline constexpr const char* kExpertFolders[] = {"high_noise", "low_noise"};
/// Models that LoRA files may change: text encoders, then denoisers.
std::vector<std::string> lora_components(const Family& family);
/// What LoRA files call a folder's models.
LoraNames lora_names(const ModelFolder& folder, const Family& family);
/// The parameters of a folder's models that LoRA files can change.
LoraTargets lora_targets(const ModelFolder& folder, const Family& family);
/// The matrices that the folder's own run has trained, then those of the keys. Logs each.
std::vector<ScaledLora> read_loras(const LoraKeys& keys, const ModelFolder& folder, const Family& family);

}  // namespace md
