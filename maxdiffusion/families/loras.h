// LoRA files of a folder's models: names, targets, and which files are loaded.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/families/learned_embeddings.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/lora/lora_merge.h"

namespace md {

/// Folders of the LoRA files of the two experts, in the order of FamilySpec::denoisers, in checkpoints of runs that
/// train both.
inline constexpr const char* kExpertFolders[] = {"high_noise", "low_noise"};
/// Components that LoRA files may change: text encoders, then denoisers.
std::vector<std::string> lora_components(const Family& family);
/// Names of a folder's models in LoRA files.
LoraNames lora_names(const ModelFolder& folder, const Family& family);
/// The parameters of a folder's models that LoRA files can change.
LoraTargets lora_targets(const ModelFolder& folder, const Family& family);
/// The matrices that the folder's own run has trained, then those of the keys. Logs each once. Learned embeddings in
/// the files must be among `learned`; others are missing keys.
std::vector<ScaledLora> read_loras(const LoraKeys& keys, const ModelFolder& folder, const Family& family,
                                   const LearnedEmbeddings& learned = {});

}  // namespace md
