#include "maxdiffusion/model_folder/upscaler_file.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {

std::string upscaler_config(const std::string& file) {
  const HostArrays tensors = SafetensorsReader::open(file).tensors();
  const auto has = [&](const std::string& layer) { return tensors.contains(layer + ".weight"); };
  const auto dim = [&](const std::string& layer, size_t i) {
    const auto found = tensors.find(layer + ".weight");
    check(
        found != tensors.end() && found->second.dims().size() == 4, Code::invalid_config,
        "upscaler: '{}' has no convolution {}.weight; expected a .safetensors file of ESRGAN or Real-ESRGAN (RRDBNet)",
        file, layer);
    return found->second.dims()[i];
  };
  const bool numbered = has("model.0"), trunk = has("RRDB_trunk.0.RDB1.conv1");
  const std::string first = numbered ? "model.0" : "conv_first";
  const auto block = [&](int64_t i) {
    return numbered ? fmt::format("model.1.sub.{}.RDB1.conv1.0", i)
           : trunk  ? fmt::format("RRDB_trunk.{}.RDB1.conv1", i)
                    : fmt::format("body.{}.rdb1.conv1", i);
  };
  const auto doubling = [&](int64_t i) {
    return numbered ? fmt::format("model.{}", 3 * i) : (trunk ? "upconv" : "conv_up") + std::to_string(i);
  };
  int64_t blocks = 0, doublings = 0;
  while (has(block(blocks))) ++blocks;
  while (has(doubling(doublings + 1))) ++doublings;
  const int64_t inputs = dim(first, 1), width = dim(first, 0), growth = dim(block(0), 0);
  int64_t unshuffle = 1;
  while (3 * unshuffle * unshuffle < inputs) unshuffle *= 2;
  check(3 * unshuffle * unshuffle == inputs, Code::invalid_config,
        "upscaler: {}.weight of '{}' reads {} channels; expected 3, 12 or 48", first, file, inputs);
  const nlohmann::json config = {{"_class_name", "RRDBNet"}, {"width", width},         {"growth", growth},
                                 {"blocks", blocks},         {"doublings", doublings}, {"unshuffle", unshuffle}};
  return config.dump(2) + "\n";
}

}  // namespace md
