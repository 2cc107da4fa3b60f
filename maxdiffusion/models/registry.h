// Model classes by their names in model_index.json and config.json: how to read a config, and the parameters of the
// model. The only list of models.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <any>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/autoencoder.h"

namespace md {

struct ModelClass {
  std::string name;  // "UNet2DConditionModel"
  /// The config struct of the model. Throws invalid_config if config.json does not describe such a model.
  std::function<std::any(const nlohmann::json& config)> read;
  /// Creates every parameter in `s` by tracing the model with the smallest inputs.
  std::function<void(const Scope& s, const std::any& config)> trace;
  /// Parameter names in files of the original program. May be empty.
  std::function<WeightNameMap(const std::any& config)> weight_names = {};
  /// Constructor of the Autoencoder; empty for other models.
  std::function<std::shared_ptr<Autoencoder>(const std::any& config)> autoencoder = {};
};

/// A class whose config struct has `static Config from_json(const nlohmann::json&)`. Parsed: the class's own config
/// struct, derived from Config, if it shares the functions of another model.
template <class Parsed = void, class Config>
ModelClass model_class(std::string name, void (*trace)(const Scope&, const Config&),
                       WeightNameMap (*weight_names)(const Config&) = nullptr,
                       std::shared_ptr<Autoencoder> (*autoencoder)(const Config&) = nullptr) {
  using Read = std::conditional_t<std::is_void_v<Parsed>, Config, Parsed>;
  ModelClass c{std::move(name), [](const nlohmann::json& j) -> std::any { return Read::from_json(j); },
               [trace](const Scope& s, const std::any& c) { trace(s, std::any_cast<const Read&>(c)); }};
  if (weight_names)
    c.weight_names = [weight_names](const std::any& config) {
      return weight_names(std::any_cast<const Read&>(config));
    };
  if (autoencoder)
    c.autoencoder = [autoencoder](const std::any& config) { return autoencoder(std::any_cast<const Read&>(config)); };
  return c;
}

/// Registers a class of another program, or replaces one of the same name. Not thread safe: call it before models are
/// opened.
void add_model_class(ModelClass c);
/// The class with this name, with or without the prefix Flax; null if unknown.
const ModelClass* find_model_class(const std::string& name);
std::vector<std::string> model_class_names();

}  // namespace md
