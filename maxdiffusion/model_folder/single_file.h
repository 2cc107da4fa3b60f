// Single files: all models of a pipeline in one safetensors file, under the names of the program that first had them.
// The pipeline follows from the file's tensors; sizes, scheduler and tokenizers are those of the published model,
// or those of a folder that the key single_file_config names.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

struct SingleFileLayout {
  std::string name;  // of the published model, for messages
  std::function<bool(const HostArrays& tensors)> is_of;
  /// Texts of the published model's folder, by path (ModelFolder::files); a tokenizer may have a tokenizer_config.json.
  /// Throws invalid_config for files of models of this kind that are not supported, naming what they are.
  std::function<std::map<std::string, std::string>(const HostArrays& tensors)> texts;
  /// Beginnings of names of tensors that such files hold in addition to the models' own.
  std::vector<std::string> unneeded;
};

/// The first layout that a file's tensors are of. Throws invalid_config, naming the layouts and the keys for files of
/// one model, where there is none.
const SingleFileLayout& find_single_file_layout(const std::string& file, const HostArrays& tensors);
/// Holds every tensor of the folder's single file against every parameter of the folder's models, by headers alone, and
/// says in one line of the log what is not read. Throws io for what is missing, of another shape or of no model.
void check_single_file(const ModelFolder& folder, const SingleFileLayout& layout, const SafetensorsReader& file);

/// The text of a config.json for a file of a ControlNet: the .json file next to it, or the folder's denoiser's with
/// what the file's own tensors say.
std::string control_config(const ModelFolder& folder, const std::string& file);

}  // namespace md
