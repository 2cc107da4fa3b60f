// The JSON files that make a folder of components a diffusers pipeline.
#pragma once

#include <string>
#include <vector>

namespace md {

/// One line of model_index.json: folder, and the Python class that reads it. Empty library: the pipeline does without.
struct PipelineComponent {
  std::string name;        // "unet"
  std::string library;     // "diffusers" or "transformers"
  std::string class_name;  // "UNet2DConditionModel"
};

/// The components of StableDiffusionXLPipeline, with `scheduler_class` ("EulerDiscreteScheduler", "DDPMScheduler", …).
std::vector<PipelineComponent> sdxl_components(const std::string& scheduler_class);

/// Text of model_index.json. `more_json`: a JSON object of further members of the pipeline, such as
/// {"force_zeros_for_empty_prompt": true}.
std::string model_index_json(const std::string& pipeline_class, const std::vector<PipelineComponent>& components,
                             const std::string& more_json = "{}");

/// A component's config as diffusers writes it: `config_json` (an object) with _class_name and _diffusers_version set.
/// Throws invalid_config when it is not an object.
std::string component_config_json(const std::string& class_name, const std::string& config_json);

}  // namespace md
