#include "tests/single_file/models.h"

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {
namespace {

namespace fs = std::filesystem;
const std::string kGolden = MD_SOURCE_DIR "/tests/golden";

HostArray transposed_by_hand(const HostArray& a) {
  HostArray out(Shape{DType::f32, {a.dims()[1], a.dims()[0]}});
  auto from = a.view<float>();
  auto to = out.mutable_view<float>();
  const auto rows = static_cast<size_t>(a.dims()[0]), columns = static_cast<size_t>(a.dims()[1]);
  for (size_t i = 0; i < rows; ++i)
    for (size_t k = 0; k < columns; ++k) to[k * rows + i] = from[i * columns + k];
  return out;
}

}  // namespace

void write_folder(const std::string& which, const std::string& folder) {
  const auto recursive = fs::copy_options::recursive | fs::copy_options::overwrite_existing;
  const std::string from = which == "sd2"       ? kGolden + "/single_file/sd2"
                           : which == "refiner" ? kGolden + "/refiner/refiner"
                                                : kGolden + "/pipelines/" + which;
  fs::copy(from, folder, recursive);
  if (which == "sd2") fs::copy(kGolden + "/pipelines/sd/tokenizer", folder + "/tokenizer", recursive);
  const ModelFolder opened = ModelFolder::open(folder);
  for (const auto& [name, component] : opened.components()) {
    HostArrays values;
    if (which == "sd2") {
      const ParamTable params = opened.params(name);
      for (const Param& p : params.params()) values[p.path] = initial_value(p, 5);
    } else {
      values = SafetensorsReader::open(component.weights).tensors();
      for (auto& [key, array] : values) array = array.cast(DType::f32);
    }
    write_safetensors(component.weights + "/" + weights_stem(name) + ".safetensors", values);
  }
}

HostArrays weights_of_folder(const std::string& folder) {
  HostArrays all;
  for (const char* name : {"unet", "vae", "text_encoder", "text_encoder_2", "controlnet"})
    if (exists(folder + "/" + name))
      for (const auto& [key, array] : SafetensorsReader::open(folder + "/" + name).tensors()) {
        // transformers omits this part of the names of its CLIPTextModel.
        const bool bare = std::string(name).starts_with("text_encoder") && !key.starts_with("text_");
        all[fmt::format("{}/{}{}", name, bare ? "text_model." : "", key)] = array;
      }
  return all;
}

HostArrays original_of_folder(const std::string& which, const std::string& folder) {
  static const auto tables = parse_json(read_file(kGolden + "/single_file/names.json"));
  const HostArrays weights = weights_of_folder(folder);
  HostArrays out;
  for (const auto& [name, record] : tables.at(which).items()) {
    HostArray whole(Shape{DType::f32, record.at("shape").get<Dims>()});
    std::byte* to = whole.mutable_data();
    for (const std::string part : record.at("of")) {
      HostArray array = weights.at(part);
      if (record.contains("transposed")) array = transposed_by_hand(array);
      std::memcpy(to, array.data(), array.bytes());
      to += array.bytes();
    }
    out[name] = whole;
  }
  return out;
}

}  // namespace md
