// LoRA files as training and tools write them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/families/loras.h"

namespace md {

/// Writes one file in a layout: kohya, comfyui, diffusers, or where it is empty the one of these that other programs of
/// the family read. `metadata`: for kohya's layout, in addition to what its matrices and the family say. Throws
/// invalid_config for another.
void write_lora_layout(const std::string& path, const LoraFile& lora, const ModelFolder& folder, const Family& family,
                       const std::string& layout, const std::map<std::string, std::string>& metadata);

}  // namespace md
