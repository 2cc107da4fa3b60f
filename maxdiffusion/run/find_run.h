// Finds the run that a config or a path refers to.
#pragma once

#include <string>

#include "maxdiffusion/settings/requests.h"

namespace md {

/// The config file for a command's first word: the file itself, or config.yml in a run's folder. Throws invalid_config
/// for a folder without one.
std::string config_file(const std::string& name);

/// Model and output folder of `generate`.
struct ModelToSample {
  std::string model;   // as in open_model
  ModelKeys keys;      // without keys of weights that the run's checkpoint replaces
  std::string folder;  // folder of generated images: the run's folder, or output_dir; may be in a bucket
};
/// The model of the command line, else the run's newest checkpoint, else the config's model. A config.yml belongs to
/// the run in its own folder, whatever its output_dir is. For other configs the run is searched in output_dir of the
/// command line, else of the file. If there is no checkpoint, throws invalid_config, listing the places that were
/// searched and the runs there, if the config trains new weights (train_new_…, random_text_encoder, train_lora), is a
/// run's own, or the command line sets checkpoint_dir.
ModelToSample model_to_sample(const RunSearch& search);

}  // namespace md
