// A model opened for a run or a pipeline: its folder, the family that its models belong to, and where the weights of
// each come from.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

/// What the weights are for; see ModelWeights.
enum class Purpose { training, sampling };

struct OpenedModel {
  ModelFolder folder;
  std::shared_ptr<const Family> family;
  ModelWeights weights;
};
/// `model`: as model_on_this_machine takes it; `keys` say what else the folder is and what replaces its weights;
/// `controlnet`: a ControlNet's folder or file, which becomes the component "controlnet", or empty. `seed`: of weights
/// that are random. Throws io where files are missing or weights do not match their configs; invalid_config for a
/// folder that has no family, or is not what `keys` say.
OpenedModel open_model(const std::string& model, const ModelKeys& keys, Purpose purpose, uint64_t seed = 0,
                       const std::string& controlnet = "");

/// Throws io for the first of the components that sampling needs whose weights are not there.
void check_weights(const OpenedModel& model);
/// After numbers that are not finite: a note for the first tensor of the model's files that holds one, where any does.
void note_damaged_weights(const OpenedModel& model, Error& e);

/// `model` itself, or, of a run's folder, its newest checkpoint; of a bucket (gs://, s3://), a copy on this machine: of
/// a folder, a file, or a checkpoint without its training state. What is here already is not fetched again. Throws io.
std::string model_on_this_machine(const std::string& model);
/// The newest checkpoint of the run whose folder `from` is; anything else is returned as it is. In buckets, too. Throws
/// io for a run without a checkpoint.
std::string newest_checkpoint(const std::string& from);

}  // namespace md
