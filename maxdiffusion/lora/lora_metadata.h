// PEFT's LoraConfig, in the JSON that diffusers and PEFT write.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/lora/adapter.h"

namespace md {

class LoraMetadata {
 public:
  /// From the metadata of the safetensors file at `path` (PEFT's JSON, else texts such as "transformer.lora_alpha"),
  /// and from adapter_config.json in its folder if the file has PEFT's name. Throws invalid_config for text that is not
  /// JSON and for options that change the formula (a bias, changed base weights), naming them.
  static LoraMetadata read(const std::string& path, const std::map<std::string, std::string>& file_metadata);
  /// Whether the metadata has values for the component (or for every component).
  bool covers(const std::string& component) const;
  /// alpha of a module named as in the file, without the component: the product is scaled by alpha / rank.
  double alpha(const std::string& component, const std::string& module, int64_t rank) const;
  /// Whether PEFT's feedforward_modules name the module.
  bool scales_input(const std::string& component, const std::string& module) const;

  /// Logs the first of what is doubtful about the file's alpha.
  void warn(const std::string& doubt) const;

 private:
  std::string path_;
  mutable bool warned_ = false;
  struct Component;
  const Component* find(const std::string& component) const;
  std::map<std::string, std::shared_ptr<const Component>> components_;  // "": every one
};

/// The JSON of `lora_adapter_metadata` for matrices of these ranks and alphas, component → module → value.
struct LoraStrength {
  int64_t rank = 0;
  double alpha = 0;
};
std::string lora_metadata_json(const std::map<std::string, std::map<std::string, LoraStrength>>& modules,
                               bool dora = false);

/// How LoKr's factors follow from a weight's sizes.
struct LokrSizes {
  int64_t factor = -1;
  bool decompose_both = false;
};
/// adapter_config.json of PEFT for a kind other than lora, by module; with a component, the members that diffusers has
/// in `lora_adapter_metadata`.
std::string peft_config_json(const Adapter& kind, const std::map<std::string, LoraStrength>& strengths,
                             const std::vector<std::string>& input_scaled, std::optional<LokrSizes> lokr,
                             const std::string& component = "");

}  // namespace md
