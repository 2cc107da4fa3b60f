// PEFT's LoraConfig, in the JSON that diffusers and PEFT write.
#pragma once

#include <map>
#include <memory>
#include <string>

namespace md {

class LoraMetadata {
 public:
  /// From the metadata of the safetensors file at `path`, and from adapter_config.json in its folder if the file has
  /// PEFT's name. Throws invalid_config for text that is not JSON and for options that change the formula (DoRA, a
  /// bias, changed base weights), naming them.
  static LoraMetadata read(const std::string& path, const std::map<std::string, std::string>& file_metadata);
  /// Whether the metadata has values for the component (or for every component).
  bool covers(const std::string& component) const;
  /// alpha of a module named as in the file, without the component: the product is scaled by alpha / rank.
  double alpha(const std::string& component, const std::string& module, int64_t rank) const;

 private:
  struct Component;
  const Component* find(const std::string& component) const;
  std::map<std::string, std::shared_ptr<const Component>> components_;  // "": every one
};

/// The JSON of `lora_adapter_metadata` for matrices of these ranks and alphas, component → module → value.
struct LoraStrength {
  int64_t rank = 0;
  double alpha = 0;
};
std::string lora_metadata_json(const std::map<std::string, std::map<std::string, LoraStrength>>& modules);

}  // namespace md
