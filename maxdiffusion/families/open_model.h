// A model opened for a run or a pipeline: its folder, its family, and the sources of its weights.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/families/added_models.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/families/learned_embeddings.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

/// Use of the weights; see ModelWeights.
enum class Purpose { training, sampling };

struct OpenedModel {
  ModelFolder folder;
  std::shared_ptr<const Family> family;
  ModelWeights weights;
  LearnedEmbeddings learned = {};
};
/// Files or folders of image adapters; empty: none.
struct AdapterFiles {
  std::string ip_adapter, ip_adapter_image_encoder;  // the latter empty: next to the first, or the model folder's
  std::string t2i_adapter;
};
struct OpenOptions {
  Purpose purpose = Purpose::training;
  uint64_t seed = 0;                          // of random weights
  std::vector<std::string> controlnets = {};  // folders or files of ControlNets: components by control_component
  AddedModelKeys added = {};                  // become components of their keys' names
  AdapterFiles adapters = {};
  std::vector<std::string> loras = {};  // LoRA files whose learned embeddings are added
  InversionKeys inversion = {};         // the word whose embeddings are trained; their values are the caller's
};
/// `model`: as in model_on_this_machine. `keys`: what else describes the folder, and files that replace or add to its
/// weights. Throws io if files are missing or weights do not match their configs; invalid_config if the folder has no
/// family or contradicts `keys`.
OpenedModel open_model(const std::string& model, const ModelKeys& keys, const OpenOptions& options);

/// The folder of a local path with the options that keys set in place of the folder's. Throws as ModelFolder::open.
ModelFolder described_folder(const std::string& model, const ModelKeys& keys);

/// Throws io naming the first component needed for sampling whose weights are missing.
void check_weights(const OpenedModel& model);
/// For an error about non-finite values: adds a note naming the first tensor of the model's files that contains one, if
/// any.
void note_damaged_weights(const OpenedModel& model, Error& e);

/// Resolves `model` to a local path: the newest checkpoint of a run's folder; from a bucket (gs://, s3://), a copy of a
/// folder, a file, or a checkpoint without its training state; else `model` itself. Files that are already local are
/// not fetched again. Throws io.
std::string model_on_this_machine(const std::string& model);
/// The newest checkpoint if `from` is a run's folder, also in a bucket; anything else is returned unchanged. Throws io
/// for a run without a checkpoint.
std::string newest_checkpoint(const std::string& from);

}  // namespace md
