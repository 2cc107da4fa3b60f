// Files and folders of other trainers that describe a data set: kohya's sd-scripts and musubi-tuner (TOML, or the same
// as JSON), SimpleTuner (a JSON list), ai-toolkit (a config's `datasets:`), and kohya's folder names ("10_name"). Every
// key takes effect, or a warning or error names it with its line. Sources: docs/config_README-en.md of sd-scripts,
// docs/dataset_config.md of musubi-tuner, documentation/DATALOADER.md of SimpleTuner, the config examples of
// ai-toolkit.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/data/folders/data_folders.h"

namespace md {

struct DatasetFile {
  std::string name;                  // "kohya dataset 'dataset.toml'"
  std::vector<DataFolder> folders;   // at least one
  std::vector<int64_t> batch_sizes;  // batch sizes set in the file
};
/// Reads a data set description. `where`: a .toml, .json, .yaml or .yml file, or a folder whose subfolders' names start
/// with repeats. `class_folder`: such a folder of regularization images; only with a folder. `usual`: defaults for what
/// the file does not set. Throws invalid_config with file and line; io if the file cannot be read.
DatasetFile read_dataset_file(const std::string& where, const std::string& class_folder, const FolderImages& usual);

}  // namespace md
