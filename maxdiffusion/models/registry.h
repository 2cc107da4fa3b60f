// Model classes by the names that model_index.json and config.json give them: how a config is read, and what
// parameters the model has. A model folder is opened through this list, so no part of a run has a list of its own.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <any>
#include <functional>
#include <string>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/autoencoder.h"

namespace md {

struct ModelClass {
  std::string name;  // "UNet2DConditionModel"
  /// The config struct of the model. Throws invalid_config where config.json does not describe such a model.
  std::function<std::any(const nlohmann::json& config)> read;
  /// Asks `s` for every parameter, by building the model for inputs of the smallest sizes.
  std::function<void(const Scope& s, const std::any& config)> trace;
  /// What files of another program call the parameters. May be empty: there are none.
  std::function<WeightNameMap(const std::any& config)> weight_names = {};
  /// Of autoencoders: what they answer. Empty: the class is none.
  std::function<std::shared_ptr<Autoencoder>(const std::any& config)> autoencoder = {};
};

/// A class whose config struct has a `static Config from_json(const nlohmann::json&)`.
template <class Config>
ModelClass model_class(std::string name, void (*trace)(const Scope&, const Config&),
                       WeightNameMap (*weight_names)(const Config&) = nullptr,
                       std::shared_ptr<Autoencoder> (*autoencoder)(const Config&) = nullptr) {
  ModelClass c{std::move(name), [](const nlohmann::json& j) -> std::any { return Config::from_json(j); },
               [trace](const Scope& s, const std::any& c) { trace(s, std::any_cast<const Config&>(c)); }};
  if (weight_names)
    c.weight_names = [weight_names](const std::any& config) {
      return weight_names(std::any_cast<const Config&>(config));
    };
  if (autoencoder)
    c.autoencoder = [autoencoder](const std::any& config) { return autoencoder(std::any_cast<const Config&>(config)); };
  return c;
}

/// For classes of other programs; those of this library are always there. Not thread safe: call it before anything is
/// opened. Replaces a class of the same name.
void add_model_class(ModelClass c);
/// By name, with or without the prefix Flax; null where there is none.
const ModelClass* find_model_class(const std::string& name);
std::vector<std::string> model_class_names();

}  // namespace md
