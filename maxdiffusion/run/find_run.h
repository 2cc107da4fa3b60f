// Finds the run that a config or a path names.
#pragma once

#include <string>

#include "maxdiffusion/settings/requests.h"

namespace md {

/// The config file that a command's first word names: itself, or, of a run's folder, the config.yml in it. Throws
/// invalid_config for a folder without one.
std::string config_file(const std::string& name);

/// What `generate` samples with.
struct ModelToSample {
  std::string model;   // as open_model takes it
  ModelKeys keys;      // without those whose weights the run's checkpoint replaces
  std::string folder;  // where its images go: the run's folder, or output_dir; may be in a bucket
};
/// The model given on the command line, else the run's newest checkpoint, else the config's model. The run of a
/// config.yml is where that file is, whatever output_dir says; of any other config, in output_dir of the command line
/// or, if it is not there, of the file. Throws invalid_config, naming the places that were searched and the runs that
/// are there, where there is no checkpoint and the config says how to train a model (train_new_…,
/// random_text_encoder, train_lora) or is a run's own, or the command line gives a checkpoint_dir.
ModelToSample model_to_sample(const RunSearch& search);

}  // namespace md
