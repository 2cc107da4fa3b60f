// A command's words if its first one names a model, not a config.
#pragma once

#include <string>

#include "maxdiffusion/commands/command.h"

namespace md {

/// Whether the word names a model: a folder with model_index.json and without config.yml, a .safetensors or .gguf file,
/// hf://OWNER/NAME, or OWNER/NAME if there is no folder OWNER.
bool names_model(const std::string& word);
/// The key=value words for sampling `model`: size, steps and guidance as its family's SampleDefaults say, then `keys`.
/// The model is fetched if it is on the hub. Throws as open_model does for a model without a family.
Words words_of_model(const std::string& model, const Words& keys);

}  // namespace md
