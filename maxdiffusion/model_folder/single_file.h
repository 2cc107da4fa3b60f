// Single files: all models of a pipeline in one safetensors file, under the original program's names, or all but some
// that keys replace. The pipeline follows from the file's tensors; sizes, scheduler and tokenizers are the published
// model's, or come from a folder that the key single_file_config names.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

/// Tensors that say that a model predicts velocity, and that its betas are rescaled (ModelFolder::take_marks). Source:
/// ComfyUI, supported_models.py.
constexpr const char *kVelocityMark = "v_pred", *kZeroSnrMark = "ztsnr";

struct SingleFileLayout {
  std::string name;  // of the published model, for messages
  std::function<bool(const HostArrays& tensors)> is_of;
  /// Texts of the published model's folder, by path (ModelFolder::files), optionally with a tokenizer's
  /// tokenizer_config.json. Throws invalid_config, naming the model, for unsupported models of this kind.
  std::function<std::map<std::string, std::string>(const HostArrays& tensors)> texts;
  /// Prefixes of tensors that such files hold in addition to the models' own.
  std::vector<std::string> unneeded;
};

/// The first layout that matches a file's tensors. Throws invalid_config if none does; the message lists the layouts
/// and the keys for files of a single model.
const SingleFileLayout& find_single_file_layout(const std::string& file, const HostArrays& tensors);
/// Compares every tensor of the folder's single file with every parameter of the folder's models, from headers alone,
/// and logs the tensors that are not read. Returns the components of which the file has no tensor. Throws io for
/// tensors that are missing, of another shape or of no model.
std::set<std::string> check_single_file(const ModelFolder& folder, const SingleFileLayout& layout,
                                        const SafetensorsReader& file);

/// The text of a config.json for a ControlNet's file: the .json file next to it, or the config of the folder's denoiser
/// with the values that follow from the file's tensors.
std::string control_config(const ModelFolder& folder, const std::string& file);

}  // namespace md
