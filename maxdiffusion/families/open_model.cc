#include "maxdiffusion/families/open_model.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/finite.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/model_folder/single_file.h"
#include "maxdiffusion/model_folder/tiny_autoencoder_file.h"
#include "maxdiffusion/model_folder/upscaler_file.h"
#include "maxdiffusion/models/ip_adapter.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// `_class_name` of a config.json's text; null: it has none.
nlohmann::json class_of(const std::string& config) {
  const auto parsed = parse_json_or_discard(config);
  return parsed.is_object() ? parsed.value("_class_name", nlohmann::json()) : nlohmann::json();
}

/// The config of a tiny autoencoder in `files` that has none; empty: there is one, or the weights are of another model.
std::string missing_tiny_config(const std::string& files, bool images) {
  if (std::filesystem::is_directory(files) ? exists(files + "/config.json") : !exists(files)) return "";
  return tiny_autoencoder_config(files, images);
}

/// An autoencoder from another file brings its own config.json, if it has one, or what its weights tell.
void take_autoencoders_config(ModelFolder& folder, const Autoencoder& replaced, const std::string& vae_file) {
  const std::string& component = replaced.component;
  if (vae_file.empty() || component.empty()) return;
  const std::string files = component_files(vae_file, component),
                    config_folder = std::filesystem::is_directory(files)
                                        ? files
                                        : std::filesystem::absolute(files).parent_path().string();
  const std::string config = config_folder + "/config.json";
  const nlohmann::json its = exists(config) ? class_of(read_file(config)) : nlohmann::json();
  if (const std::string tiny = missing_tiny_config(files, replaced.frame_scale == 0); !tiny.empty()) {
    const std::string tiny_class = class_of(tiny);
    if (its != tiny_class) {
      folder.set_config(component, tiny, files, tiny_class);
      log_info("vae_file: {} is read as {}", files, tiny_class);
      return;
    }
  }
  if (!exists(config)) return;
  const std::string class_name = folder.components().at(component).class_name;
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
  check(exists(tiny), Code::io, "preview_autoencoder '{}': no such file or folder", tiny);
  const std::shared_ptr<const Autoencoder> coder = make_family(folder)->spec().autoencoder;
  const bool videos = coder->frame_scale > 0;
  if (const std::string config = missing_tiny_config(tiny, !videos); !config.empty())
    folder.add_component(kName, tiny, config);
  else if (std::filesystem::is_directory(tiny))
    folder.add_component(kName, tiny);
  else
    fail(Code::invalid_config,
         "preview_autoencoder '{}' is another model's file; expected a tiny autoencoder's: a folder of AutoencoderTiny "
         "(TAESD, TAEF1), taef2.safetensors, taew2_1.safetensors or taew2_2.safetensors",
         tiny);
  check(!videos || folder.components().at(kName).class_name == "TAEHV", Code::invalid_config,
        "preview_autoencoder '{}' is of images; expected one of videos, as in taew2_1.safetensors", tiny);
  const std::shared_ptr<const Autoencoder> its = folder.autoencoder(kName, videos);
  check(
      its->channels == coder->channels && its->downscale == coder->downscale && its->frame_scale == coder->frame_scale,
      Code::invalid_config,
      "preview_autoencoder '{}' decodes latents of {} channels to images {} times as large; expected {} and {}, as the "
      "model's autoencoder has them",
      tiny, its->channels, its->downscale, coder->channels, coder->downscale);
}

/// The only .safetensors file of a folder.
std::string only_file(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& f : std::filesystem::directory_iterator(folder))
    if (f.path().extension() == ".safetensors") files.push_back(f.path().string());
  check(files.size() == 1, Code::io, "ip_adapter '{}': {} .safetensors files; expected one, or name the file", folder,
        files.size());
  return files[0];
}

void add_ip_adapter(ModelFolder& folder, const AdapterFiles& adapters) {
  namespace fs = std::filesystem;
  const std::string& name = adapters.ip_adapter;
  check(exists(name), Code::io, "ip_adapter '{}': no such file or folder", name);
  const std::string file = fs::is_directory(name) ? only_file(name) : name,
                    next_to = (fs::path(file).parent_path() / "image_encoder").string();
  folder.add_component("ip_adapter", file, ip_adapter_config(SafetensorsReader::open(file).tensors(), file));
  const std::string encoder = !adapters.ip_adapter_image_encoder.empty() ? adapters.ip_adapter_image_encoder
                              : fs::is_directory(next_to)                ? next_to
                                                                         : "";
  check(!encoder.empty() || folder.has("image_encoder"), Code::invalid_config,
        "ip_adapter_image_encoder is empty, and there is no '{}'; expected the folder of the CLIP image encoder that "
        "the adapter was trained with",
        next_to);
  if (encoder.empty()) return;
  nlohmann::json config = parse_json_or_discard(read_file(encoder + "/config.json"));
  check(config.is_object(), Code::io, "'{}/config.json' is not a JSON object", encoder);
  const auto names = config.find("architectures");
  const bool named = names != config.end() && names->is_array() && !names->empty() && names->front().is_string();
  config["_class_name"] = named ? names->front().get<std::string>() : "CLIPVisionModelWithProjection";
  folder.add_component("image_encoder", encoder, dump_json(config, 2));
}

ModelFolder open_folder(const std::string& model, const ModelKeys& keys, const OpenOptions& o) {
  const std::vector<std::string>& controlnets = o.controlnets;
  const AddedModelKeys& added = o.added;
  ModelFolder folder = described_folder(model, keys);
  for (size_t i = 0; !controlnets.empty() && folder.has(control_component(i)); ++i)  // the folder's own ControlNets
    folder.remove_component(control_component(i));
  for (size_t i = 0; i < controlnets.size(); ++i)
    if (std::filesystem::is_regular_file(controlnets[i]))
      folder.add_component(control_component(i), controlnets[i], control_config(folder, controlnets[i]));
    else
      folder.add_component(control_component(i), controlnets[i]);
  if (!o.adapters.ip_adapter.empty()) add_ip_adapter(folder, o.adapters);
  if (!o.adapters.t2i_adapter.empty()) {
    folder.remove_component("adapter");
    folder.add_component("t2i_adapter", o.adapters.t2i_adapter);
  }
  take_autoencoders_config(folder, *make_family(folder)->spec().autoencoder, keys.vae_file);
  if (!added.preview_autoencoder.empty()) add_previewer(folder, added.preview_autoencoder);
  if (!added.upscaler.empty()) folder.add_component("upscaler", added.upscaler, upscaler_config(added.upscaler));
  return folder;
}

/// The rows of all embeddings, in order.
HostArray rows_of(const std::vector<LearnedEmbedding>& embeddings) {
  int64_t n = 0, at = 0;
  for (const LearnedEmbedding& e : embeddings) n += e.rows.dims()[0];
  HostArray all;
  for (const LearnedEmbedding& e : embeddings) {
    add_rows(all, n, at, e.rows);
    at += e.rows.dims()[0];
  }
  return all;
}

void set_placeholders(ModelFolder& folder, const Family& family, const LearnedEmbeddings& learned,
                      const InversionKeys& inversion) {
  bool any = false;
  for (const TextEncoderSpec& e : family.spec().text_encoders) {
    if (e.embedding_width == 0) continue;
    any = true;
    std::vector<Placeholder> placeholders;
    if (const auto its = learned.find(e.component); its != learned.end())
      for (const LearnedEmbedding& one : its->second) placeholders.push_back({one.word, one.rows.dims()[0]});
    if (!inversion.placeholder_token.empty())
      placeholders.push_back({inversion.placeholder_token, inversion.num_vectors});
    folder.set_placeholders(e.component, std::move(placeholders));
  }
  check(any, Code::invalid_config,
        "placeholder_token is '{}'; expected empty: this model's text encoders take no learned embeddings",
        inversion.placeholder_token);
}

/// The id of the initial word in each text encoder. Throws invalid_config for words that cannot be trained.
std::map<std::string, int32_t> initial_tokens(const Family& family, const InversionKeys& keys) {
  check(keys.placeholder_token.find_first_of("{}|\\ \t\n") == std::string::npos, Code::invalid_config,
        "placeholder_token is '{}'; expected a word without blanks, braces and |, as in <cat-toy>",
        keys.placeholder_token);
  check(!keys.initializer_token.empty(), Code::invalid_config,
        "placeholder_token is '{}' without initializer_token; expected the word whose embeddings it starts with, as in "
        "toy",
        keys.placeholder_token);
  std::map<std::string, int32_t> ids;
  for (const TextEncoderSpec& e : family.spec().text_encoders) {
    if (e.embedding_width == 0) continue;
    const std::vector<int32_t> tokens = e.tokenizer->tokens(keys.initializer_token, e.max_tokens);
    check(tokens.size() == 3, Code::invalid_config,
          "initializer_token is '{}', which {} reads as {} tokens; expected a word of one token, as in toy",
          keys.initializer_token, e.component, tokens.size() - 2);
    ids[e.component] = tokens[1];
  }
  return ids;
}

}  // namespace

ModelFolder described_folder(const std::string& model, const ModelKeys& keys) {
  ModelFolder folder = ModelFolder::open(model, keys);
  if (!keys.text_encoder_out_layers.empty()) folder.set_option("text_encoder_out_layers", keys.text_encoder_out_layers);
  if (keys.max_sequence_length) folder.set_option("max_sequence_length", *keys.max_sequence_length);
  if (keys.reference_resolution) folder.set_option("reference_resolution", *keys.reference_resolution);
  return folder;
}

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

OpenedModel open_model(const std::string& model, const ModelKeys& keys, const OpenOptions& o) {
  ModelFolder folder = open_folder(model_on_this_machine(model), keys, o);
  std::shared_ptr<const Family> family = make_family(folder);
  check_kind(keys, folder, *family);
  const bool trains = o.purpose == Purpose::training;
  const LearnedEmbeddings learned = read_learned_embeddings(keys, *family, trains ? "" : folder.path(), o.loras);
  if (!learned.empty() || !o.inversion.placeholder_token.empty()) {
    set_placeholders(folder, *family, learned, o.inversion);
    family = make_family(folder);
  }
  ModelWeights weights = trains ? ModelWeights::for_training(folder, *family, keys, o.seed)
                                : ModelWeights::for_sampling(folder, *family, keys, o.seed);
  if (!o.inversion.placeholder_token.empty())
    for (const auto& [component, id] : initial_tokens(*family, o.inversion)) weights.set_added_rows_like(component, id);
  for (const std::string& denoiser : family->spec().denoisers)
    if (const std::string file = weights.location(denoiser);
        file != folder.path() && std::filesystem::is_regular_file(file))
      folder.take_marks(file, SafetensorsReader::open(file), true);
  for (const auto& [component, embeddings] : learned) weights.set_added_rows(component, rows_of(embeddings));
  return {std::move(folder), std::move(family), std::move(weights), learned};
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
