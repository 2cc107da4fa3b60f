// LoRA files and the models of a folder: what is called what, which are added, and how new ones are written.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/settings/run_info.h"

namespace md {

/// Models that LoRA files may change: text encoders, then denoisers.
std::vector<std::string> lora_components(const Family& family);
/// What LoRA files call a folder's models.
LoraNames lora_names(const ModelFolder& folder, const Family& family);
/// The parameters of a folder's models that LoRA files can change.
LoraTargets lora_targets(const ModelFolder& folder, const Family& family);
/// The matrices that the folder's own run has trained, then those of the keys. Logs each.
std::vector<ScaledLora> read_loras(const LoraKeys& keys, const ModelFolder& folder, const Family& family);

/// Writes one file in a layout: kohya, comfyui, diffusers, or where it is empty the one of these that other programs of
/// the family read. `metadata`: for kohya's, beside what its matrices and the family say. Throws invalid_config for
/// another.
void write_lora_layout(const std::string& path, const LoraFile& lora, const ModelFolder& folder, const Family& family,
                       const std::string& layout, const std::map<std::string, std::string>& metadata);
/// What kohya's programs say of a training in the metadata of LoRA files, of those keys that have a like.
/// Source: kohya-ss sd-scripts, train_network.py.
std::map<std::string, std::string> kohya_metadata(const RunConfig& config, const RunInfo& run, const Family& family);

}  // namespace md
