// Source: what diffusers 0.42 writes with save_pretrained.
#include "maxdiffusion/checkpoint/diffusers_layout.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Json = nlohmann::json;  // members sorted by name, as diffusers writes them

constexpr const char* kDiffusersVersion = "0.42.1";  // whose layout this is

Json parse_object(const std::string& what, const std::string& text) {
  Json j = Json::parse(text, nullptr, false);
  check(j.is_object(), Code::invalid_config, "{}: expected a JSON object, found {}", what, text.substr(0, 80));
  return j;
}

}  // namespace

std::vector<PipelineComponent> sdxl_components(const std::string& scheduler_class) {
  return {{"feature_extractor", "", ""},
          {"image_encoder", "", ""},
          {"scheduler", "diffusers", scheduler_class},
          {"text_encoder", "transformers", "CLIPTextModel"},
          {"text_encoder_2", "transformers", "CLIPTextModelWithProjection"},
          {"tokenizer", "transformers", "CLIPTokenizer"},
          {"tokenizer_2", "transformers", "CLIPTokenizer"},
          {"unet", "diffusers", "UNet2DConditionModel"},
          {"vae", "diffusers", "AutoencoderKL"}};
}

std::string model_index_json(const std::string& pipeline_class, const std::vector<PipelineComponent>& components,
                             const std::string& more_json) {
  Json j = parse_object("model_index.json", more_json);
  j["_class_name"] = pipeline_class;
  j["_diffusers_version"] = kDiffusersVersion;
  for (const PipelineComponent& c : components)
    j[c.name] = c.library.empty() ? Json{nullptr, nullptr} : Json{c.library, c.class_name};
  return j.dump(2) + "\n";
}

std::string component_config_json(const std::string& class_name, const std::string& config_json) {
  Json j = parse_object(class_name + " config", config_json);
  j["_class_name"] = class_name;
  j["_diffusers_version"] = kDiffusersVersion;
  return j.dump(2) + "\n";
}

}  // namespace md
