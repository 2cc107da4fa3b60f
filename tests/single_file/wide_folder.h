// A family's tiny folder whose denoiser has random weights and is wide enough for quantization blocks.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

/// `golden`: a folder below tests/golden; `changes`: members of the component's config.json.
inline void write_wide_folder(const std::string& golden, const std::string& folder, const nlohmann::json& changes,
                              const std::string& component = "transformer") {
  std::filesystem::copy(MD_SOURCE_DIR "/tests/golden/" + golden, folder, std::filesystem::copy_options::recursive);
  const std::string file = folder + "/" + component + "/config.json";
  nlohmann::json config = parse_json(read_file(file));
  config.update(changes);
  write_file_atomic(file, config.dump(2));
  const ParamTable params = ModelFolder::open(folder).params(component);
  HostArrays values;
  for (const Param& p : params.params()) values[p.path] = initial_value(p, 5);
  const char* name = component == "transformer" ? "diffusion_pytorch_model" : "model";
  write_safetensors(folder + "/" + component + "/" + name + ".safetensors", values);
}

inline const nlohmann::json kWideFlux = {{"attention_head_dim", 32}, {"axes_dims_rope", {8, 12, 12}}};
inline const nlohmann::json kWideQwen3 = {{"intermediate_size", 96}};
inline const nlohmann::json kWideWan = {{"attention_head_dim", 32}, {"ffn_dim", 128}};

}  // namespace md
