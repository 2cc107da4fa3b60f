// Writing of LoRA files, for training and tools.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/families/loras.h"

namespace md {

/// Writes one file in a layout: kohya, comfyui or diffusers; empty: the layout that other programs for this family
/// read. `metadata`: added to kohya's metadata of the matrices and the family. Throws invalid_config for an unknown
/// layout.
void write_lora_layout(const std::string& path, const LoraFile& lora, const ModelFolder& folder, const Family& family,
                       const std::string& layout, const std::map<std::string, std::string>& metadata);

}  // namespace md
