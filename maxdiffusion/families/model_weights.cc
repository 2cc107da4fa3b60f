#include "maxdiffusion/families/model_weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weight_format.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/model_folder/match_weights.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/storage/hub_cache.h"

namespace md {
namespace {

constexpr std::string_view kT5 = "T5EncoderModel";
/// Keys of files in place of text encoders, and the classes of these.
constexpr std::pair<std::string_view, std::string_view> kTextEncoderKeys[] = {
    {"clip_model_name_or_path", "CLIPTextModel"}, {"t5xxl_model_name_or_path", kT5}};

bool random_by_key(const Family& family, const ModelKeys& keys, const std::string& component) {
  if (std::ranges::count(family.spec().denoisers, component) > 0) return new_denoiser(keys);
  if (component == family.spec().autoencoder->component) return keys.train_new_vae;
  return std::ranges::count(family.spec().text_encoders, component, &TextEncoderSpec::component) > 0 &&
         keys.random_text_encoder;
}

/// Files that replace the denoiser's weights; empty: none.
std::string replacement(const Family& family, const ModelKeys& keys) {
  std::string files, used_key;
  for (const auto& [key, name] : std::vector<std::pair<std::string, std::string>>{
           {"lightning_repo", keys.lightning_repo},
           {"wan_transformer_pretrained_model_name_or_path", keys.wan_transformer_pretrained_model_name_or_path},
           {"unet_checkpoint", keys.unet_checkpoint}}) {
    if (name.empty()) continue;
    if (!used_key.empty()) {
      log_warning("{} is ignored: {} says where the weights are", key, used_key);
      continue;
    }
    used_key = key;
    files = key == "lightning_repo" ? local_file(name, keys.lightning_ckpt)
                                    : component_files(name, family.spec().denoiser());
  }
  return files;
}

bool has_weights(const std::string& folder) {
  if (std::filesystem::is_regular_file(folder)) return true;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(folder, error))
    if (file.path().extension() == ".safetensors" || file.path().extension() == ".gguf") return true;
  return false;
}

/// Location of a text encoder's weights that a key names; empty if they are not available locally: MaxDiffusion's
/// configs name models on a hub, in another program's format. Throws io for a path that does not exist.
std::string text_encoder_files(const std::string& name, const std::string& component) {
  const bool path =
      name.starts_with("/") || name.starts_with(".") || name.ends_with(".safetensors") || name.ends_with(".gguf");
  if (path || std::filesystem::exists(name)) return component_files(name, component);
  try {
    const std::string files = component_files(name, component);
    return has_weights(files) ? files : "";
  } catch (const Error& e) {
    if (e.code() != Code::io) throw;
    return "";
  }
}

/// One layer of each parameter of a component, by its published name.
std::vector<std::string> published_names(const ParamTable& params, const std::string& component) {
  std::vector<std::string> names;
  for (const Param& p : params.params())
    if (p.model == component) names.push_back(p.stacked > 0 ? layer_path(p.path, 0) : p.path);
  return names;
}

}  // namespace

std::vector<std::string> random_weight_keys(const ModelKeys& k) {
  std::vector<std::string> names;
  for (const auto& [name, on] : {std::pair{"train_new_unet", k.train_new_unet},
                                 {"train_new_flux", k.train_new_flux},
                                 {"train_new_vae", k.train_new_vae},
                                 {"random_text_encoder", k.random_text_encoder}})
    if (on) names.emplace_back(name);
  return names;
}

bool new_denoiser(const ModelKeys& keys) { return keys.train_new_unet || keys.train_new_flux; }

ModelWeights::ModelWeights(const ModelFolder& folder, uint64_t seed) : opened_(folder.opened()), seed_(seed) {
  for (const auto& [name, component] : folder.components()) other_names_[name] = folder.weight_names(name);
}

ModelWeights ModelWeights::for_training(const ModelFolder& folder, const Family& family, const ModelKeys& keys,
                                        uint64_t seed) {
  ModelWeights w(folder, seed);
  for (const auto& [name, component] : folder.components())
    if (!random_by_key(family, keys, name)) w.locations_[name] = component.weights;
  const auto denoiser = w.locations_.find(family.spec().denoiser());
  if (const std::string files = replacement(family, keys); !files.empty() && denoiser != w.locations_.end())
    denoiser->second = files;
  w.replace_autoencoder(family, keys);
  w.replace_text_encoders(folder, keys);
  w.check_sizes(folder, family);
  return w;
}

ModelWeights ModelWeights::for_sampling(const ModelFolder& folder, const Family& family, const ModelKeys& keys,
                                        uint64_t seed) {
  ModelWeights w(folder, seed);
  for (const auto& [name, component] : folder.components()) w.locations_[name] = component.weights;
  if (const std::string files = replacement(family, keys); !files.empty())
    w.locations_[family.spec().denoiser()] = files;
  w.replace_autoencoder(family, keys);
  w.replace_text_encoders(folder, keys);
  w.check_sizes(folder, family);
  return w;
}

void ModelWeights::check_sizes(const ModelFolder& folder, const Family& family) const {
  for (const auto& [name, location] : locations_) {
    check_in_single_file(folder, family, name, location);
    if (location == folder.path() || !has_weights(location)) continue;  // a single file is checked when it is opened
    OpenedWeights::File file = OpenedWeights::open(location);
    match_weights(name, folder.components().at(name), *file, location);
    opened_->keep(name, location, std::move(file));
  }
}

void ModelWeights::check_present(const std::vector<std::string>& components) const {
  for (const std::string& name : components) {
    const auto location = locations_.find(name);
    if (location == locations_.end() || has_weights(location->second)) continue;
    try {
      OpenedWeights::open(location->second);
    } catch (Error& e) {
      throw e.note(fmt::format("the model's {} is needed: sampling never uses random weights", name));
    }
  }
}

void ModelWeights::replace_autoencoder(const Family& family, const ModelKeys& keys) {
  if (keys.vae_file.empty()) return;
  const std::string& component = family.spec().autoencoder->component;
  check(!component.empty(), Code::invalid_config, "vae_file is given; expected none: the model has no autoencoder");
  locations_[component] = component_files(keys.vae_file, component);
}

void ModelWeights::replace_text_encoders(const ModelFolder& folder, const ModelKeys& keys) {
  for (const auto& [key, class_name] : kTextEncoderKeys) {
    const std::string* name = class_name == kT5 ? &keys.t5xxl_model_name_or_path : &keys.clip_model_name_or_path;
    if (name->empty()) continue;
    const auto of_class = [class_name = class_name](const auto& item) { return item.second.class_name == class_name; };
    const auto found = std::ranges::find_if(folder.components(), of_class);
    if (found == folder.components().end()) {
      log_warning("{} is ignored: the model has no {}", key, class_name);
      continue;
    }
    const std::string files = text_encoder_files(*name, found->first);
    if (files.empty())
      log_warning("{} '{}' holds no weights; the model folder's {} is used", key, *name, found->first);
    else
      locations_[found->first] = files;
  }
}

void check_in_single_file(const ModelFolder& folder, const Family& family, const std::string& component,
                          const std::string& location) {
  if (!location.empty()) return;
  const std::string& class_name = folder.components().at(component).class_name;
  const bool coder = family.spec().autoencoder->component == component;
  const auto encoder = std::ranges::find(kTextEncoderKeys, class_name, [](const auto& row) { return row.second; });
  const std::string_view key = coder                                                        ? "vae_file"
                               : std::ranges::count(family.spec().denoisers, component) > 0 ? "unet_checkpoint"
                               : encoder != std::end(kTextEncoderKeys)                      ? encoder->first
                                                                                            : "";
  const char* kind = coder ? "autoencoder" : component.starts_with("text") ? "text encoder" : "model of this part";
  Error e(Code::invalid_config,
          fmt::format("'{}' holds no {} ({}, of class {})", folder.path(), kind, component, class_name));
  throw e.note(key.empty() ? "try: a file of the whole model, or a model folder as pretrained_model_name_or_path"
                           : fmt::format("try: {}=FILE, a file or folder of a {}", key, class_name));
}

void check_kind(const ModelKeys& keys, const ModelFolder& folder, const Family& family) {
  auto compare = [&](const char* key, const std::string& value, const std::vector<std::string>& accepted) {
    check(value.empty() || std::ranges::count(accepted, value) > 0, Code::invalid_config,
          "{} is '{}', but {} is a {}; expected {}", key, value, folder.path(), folder.pipeline(),
          accepted.empty() ? "none" : fmt::format("{}", fmt::join(accepted, " or ")));
  };
  const ReferenceConventions& reference = family.spec().reference;
  compare("model_name", keys.model_name, reference.names);
  compare("flux_name", keys.flux_name, reference.names);
  compare("model_type", keys.model_type, reference.types);
}

std::string ModelWeights::location(const std::string& component) const {
  const auto found = locations_.find(component);
  return replaced_.contains(component) || found == locations_.end() ? "" : found->second;
}

void ModelWeights::check_not_quantized(const ModelFolder& folder, const std::string& component) const {
  const std::string from = location(component);
  if (from.empty()) return;
  const SafetensorsReader file = SafetensorsReader::open(from);
  std::set<std::string> taken;  // a file may hold other models, in other types
  match_weights(component, folder.components().at(component), file, from, {.allow_unused = true, .matched = &taken});
  for (const std::string& tensor : taken) {
    const HostArray& array = file.tensors().at(tensor);
    const FoundFormat found = format_of(file.tensors(), tensor);
    const bool few_bits = found.format || (is_float(array.dtype()) && size_of(array.dtype()) == 1);
    if (!few_bits) continue;
    throw Error(Code::invalid_config,
                fmt::format("{}: weights in few bits are not trained, and '{}' in '{}' is {}; expected 16 or 32 bits",
                            component, tensor, from,
                            found.format ? std::string(found.format->name) : std::string(to_string(array.dtype()))))
        .note(std::filesystem::is_directory(from)
                  ? "try: train_lora=true, or convert the model folder with dtype=bfloat16 and train that"
                  : fmt::format("try: train_lora=true, or convert {} OUT.safetensors component={} "
                                "single_file_config=FOLDER dtype=bfloat16 and train OUT.safetensors",
                                from, component));
  }
}

std::vector<std::string> ModelWeights::linkable(const ParamTable& params, const std::string& component) const {
  const std::string from = location(component);
  if (from.empty() || !std::filesystem::is_directory(from)) return {};
  const SafetensorsReader file = SafetensorsReader::open(from);
  for (const auto& [tensor, array] : file.tensors())  // quantized: diffusers needs another config to read them
    if (format_of(file.tensors(), tensor).format) return {};
  if (const WeightNameMap& others = other_names_.at(component); others.aliases) {
    const HostArrays& found = file.tensors();
    // transformers' classes of whole language models name the part that is used here `model`.
    for (const std::string& name : published_names(params, component))
      for (const WeightAlias& other : others.aliases(name))
        if (const std::string whole = other.full_name();
            !found.contains(name) && whole != name && whole != "model." + name && found.contains(whole))
          return {};
  }
  std::vector<std::string> files = weight_files(file, from);
  // diffusers loads variants only by name.
  return std::ranges::any_of(files, has_variant) ? std::vector<std::string>() : files;
}

std::function<NamedShards()> ModelWeights::open(const ParamTable& params, const std::string& component,
                                                bool keep_types) const {
  const auto added = std::ranges::find_if(params.params(),
                                          [&](const Param& p) { return p.model == component && nn::is_added_rows(p); });
  if (added != params.params().end()) {
    const auto published = std::make_shared<const ParamTable>(nn::without_added_rows(params));
    const auto known = added_rows_.find(component);
    HostArray values = known == added_rows_.end() ? HostArray() : known->second;
    const int32_t like = values ? 0 : added_rows_like_.at(component);
    return [published, read = open(*published, component, keep_types), values, like, name = added->input,
            shape = added->shape] {
      NamedShards all = read();
      const HostArray rows_of_them =
          values
              ? values
              : repeat_rows(rows(all.at(name.substr(0, name.rfind('.')) + ".weight").whole(), like, 1), shape.dims[0]);
      all.merge(as_shards(HostArrays{{name, rows_of_them.cast(shape.dtype)}}));
      return all;
    };
  }
  if (has_few_bits(params, component) && location(component).empty()) {
    const auto plain = std::make_shared<const ParamTable>(before_few_bits(params, component));
    return [plain, &params, component, read = open(*plain, component)] {
      return as_shards(few_bits_values(params, component, as_arrays(read())));
    };
  }
  if (const auto replacement = replaced_.find(component); replacement != replaced_.end())
    return [&params, component, &values = replacement->second] {
      return as_shards(component_weights(params, component, values));
    };
  if (const std::string files = location(component); !files.empty())
    return [read = open_component(
                params, component, *opened_->take(component, files), files,
                {.allow_unused = true, .weight_names = other_names_.at(component), .keep_types = keep_types})] {
      return as_shards(read());
    };
  return [&params, component, slices = slices_, seed = seed_] {
    NamedShards out;
    for (const Param& p : params.params()) {
      if (p.model != component) continue;
      std::vector<Shard> shards;
      for (const Slice& slice : slices(p)) shards.push_back({slice, initial_value(p, seed, slice)});
      out[p.input] = {p.shape, std::move(shards)};
    }
    return out;
  };
}

std::string component_files(const std::string& name, const std::string& component) {
  if (std::filesystem::is_regular_file(name)) return name;
  const std::string folder = local_folder(name);
  return std::filesystem::is_directory(folder + "/" + component) ? folder + "/" + component : folder;
}

HostArrays component_weights(const ParamTable& params, const std::string& component, const HostArrays& all) {
  HostArrays v;
  for (const Param& p : params.params())
    if (p.model == component) v[p.input] = all.at(p.input).cast(p.shape.dtype);
  return v;
}

std::function<HostArrays()> open_component(const ParamTable& params, const std::string& component,
                                           const SafetensorsReader& file, const std::string& path,
                                           const LoadOptions& options) {
  if (has_few_bits(params, component)) {
    std::vector<WantedWeight> weights;
    for (const ParamTable plain = before_few_bits(params, component); const Param& p : plain.params())
      weights.push_back({p.path, p.shape});
    LoadOptions converted = options;
    converted.keep_types = true;                   // they are quantized from the file's type
    open_weights(file, path, weights, converted);  // throws now if weights do not match
    return [&params, component, layers = open_each_weight(file, path, weights, converted)] {
      return few_bits_values(params, component, [&](const std::string& name) { return layers.at(name).make(); });
    };
  }
  std::vector<const Param*> component_params;
  std::vector<WantedWeight> weights;
  for (const Param& p : params.params())
    if (p.model == component) {
      component_params.push_back(&p);
      weights.push_back({p.path, p.shape});
    }
  if (component_params.empty()) return [] { return HostArrays(); };
  return [component_params, read = open_weights(file, path, weights, options)] {
    HostArrays out, found = read();
    for (const Param* p : component_params) out[p->input] = found.at(p->path);
    return out;
  };
}

ArraysToWrite open_each_stored(const ParamTable& params, const std::string& component, const SafetensorsReader& file,
                               const std::string& path, const WeightNameMap& weight_names) {
  std::vector<WantedWeight> weights;
  for (const Param& p : params.params())
    if (p.model == component) weights.push_back({p.path, p.shape});
  return open_each_weight(file, path, weights, {.weight_names = weight_names, .keep_types = true});
}

NamedShards published(const ParamTable& params, const std::string& component, const NamedShards& values) {
  NamedShards out;
  for (const Param& p : params.params())
    if (p.model == component) out.merge(unstacked(p.path, values.at(p.input)));
  return out;
}

}  // namespace md
