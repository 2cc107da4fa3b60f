#include "maxdiffusion/families/open_model.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/finite.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/model_folder/single_file.h"
#include "maxdiffusion/model_folder/upscaler_file.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// An autoencoder from another file brings its own config.json, if it has one.
void take_autoencoders_config(ModelFolder& folder, const std::string& component, const std::string& vae_file) {
  if (vae_file.empty() || component.empty()) return;
  const std::string files = component_files(vae_file, component),
                    config_folder = std::filesystem::is_directory(files)
                                        ? files
                                        : std::filesystem::absolute(files).parent_path().string();
  const std::string config = config_folder + "/config.json";
  if (!exists(config)) return;
  const auto parsed = parse_json_or_discard(read_file(config));
  const std::string class_name = folder.components().at(component).class_name;
  const nlohmann::json its = parsed.is_object() ? parsed.value("_class_name", nlohmann::json()) : nlohmann::json();
  const ModelClass* known = its.is_string() ? find_model_class(its) : nullptr;
  const bool other = known && known->autoencoder && known->name != class_name;  // TAESD in place of AutoencoderKL
  if (config_folder != files && !other && its != class_name)
    return;  // config.json belongs to another file in that folder
  folder.set_config(component, read_file(config), config, other ? known->name : "");
  log_info("vae_file: {} is read with {}", files, config);
}

/// Adds a tiny autoencoder for the latents of the family's coder.
void add_previewer(ModelFolder& folder, const std::string& tiny) {
  constexpr const char* kName = "preview_autoencoder";
  check(
      std::filesystem::is_directory(tiny), Code::io,
      "preview_autoencoder '{}' is not a folder; expected one with config.json and diffusion_pytorch_model.safetensors",
      tiny);
  folder.add_component(kName, tiny);
  const Autoencoder& its = *folder.autoencoder(kName);
  const Autoencoder& coder = *make_family(folder)->spec().autoencoder;
  check(coder.frame_scale == 0 && its.channels == coder.channels && its.downscale == coder.downscale,
        Code::invalid_config,
        "preview_autoencoder '{}' decodes latents of {} channels to images {} times as large; expected {}", tiny,
        its.channels, its.downscale,
        coder.frame_scale > 0
            ? "none: this model's media are videos"
            : fmt::format("{} and {}, as the model's autoencoder has them", coder.channels, coder.downscale));
}

ModelFolder open_folder(const std::string& model, const ModelKeys& keys, const std::string& controlnet,
                        const AddedModelKeys& added) {
  ModelFolder folder = ModelFolder::open(model, keys);
  if (std::filesystem::is_regular_file(controlnet))
    folder.add_component("controlnet", controlnet, control_config(folder, controlnet));
  else if (!controlnet.empty())
    folder.add_component("controlnet", controlnet);
  if (!keys.text_encoder_out_layers.empty()) folder.set_option("text_encoder_out_layers", keys.text_encoder_out_layers);
  take_autoencoders_config(folder, make_family(folder)->spec().autoencoder->component, keys.vae_file);
  if (!added.preview_autoencoder.empty()) add_previewer(folder, added.preview_autoencoder);
  if (!added.upscaler.empty()) folder.add_component("upscaler", added.upscaler, upscaler_config(added.upscaler));
  if (keys.max_sequence_length) folder.set_option("max_sequence_length", *keys.max_sequence_length);
  if (keys.reference_resolution) folder.set_option("reference_resolution", *keys.reference_resolution);
  return folder;
}

}  // namespace

std::string newest_checkpoint(const std::string& from) {
  const std::string checkpoints = below(from, "checkpoints");
  if (!is_remote(from) && !std::filesystem::is_directory(checkpoints)) return from;
  const std::vector<int64_t> steps = list_checkpoints(checkpoints);
  if (steps.empty() && is_remote(from)) return from;
  check(!steps.empty(), Code::io, "run '{}': no checkpoint", from);
  log_info_once("the run's newest checkpoint is of step {}", steps.back());
  return checkpoint_folder(checkpoints, steps.back());
}

std::string model_on_this_machine(const std::string& location) {
  std::string model = newest_checkpoint(location);
  if (!is_remote(model)) return model;
  log_info("{}: the model is cached in '{}'", shown(model), local_cache_path(model));
  return find_file(below(model, kState)) ? local_checkpoint(model, CheckpointPart::model) : local_copy(model);
}

OpenedModel open_model(const std::string& model, const ModelKeys& keys, Purpose purpose, uint64_t seed,
                       const std::string& controlnet, const AddedModelKeys& added) {
  ModelFolder folder = open_folder(model_on_this_machine(model), keys, controlnet, added);
  std::shared_ptr<const Family> family = make_family(folder);
  check_kind(keys, folder, *family);
  ModelWeights weights = purpose == Purpose::training ? ModelWeights::for_training(folder, *family, keys, seed)
                                                      : ModelWeights::for_sampling(folder, *family, keys, seed);
  return {std::move(folder), std::move(family), std::move(weights)};
}

void check_weights(const OpenedModel& model) {
  const FamilySpec& spec = model.family->spec();
  std::vector<std::string> components = spec.denoisers;
  for (const std::string& encoder : spec.text_components()) components.push_back(encoder);
  const ImageConditioning* images = model.family->image_conditioning();
  for (const std::string& other : {spec.autoencoder->component, images ? images->encoder : ""})
    if (!other.empty()) components.push_back(other);
  model.weights.check_present(components);
}

void note_damaged_weights(const OpenedModel& model, Error& e) {
  std::set<std::string> places;
  for (const auto& [name, component] : model.folder.components())
    if (const std::string place = model.weights.location(name); !place.empty()) places.insert(place);
  for (const std::string& place : places) {
    try {
      const SafetensorsReader file = SafetensorsReader::open(place);
      for (const auto& [tensor, a] : file.tensors())
        if (const auto at = first_not_finite(a)) {
          e.note(fmt::format("'{}' in {} holds a number that is not finite, the first at index {}: the file is damaged",
                             tensor, file.file_of(tensor), *at));
          return;
        }
    } catch (const Error& unread) {
      log_debug("{}", unread.message());
    }
  }
}

}  // namespace md
