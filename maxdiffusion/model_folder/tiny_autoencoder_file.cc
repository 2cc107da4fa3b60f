#include "maxdiffusion/model_folder/tiny_autoencoder_file.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {
namespace {

using nlohmann::json;

/// Convolutions by name.
class Convolutions {
 public:
  explicit Convolutions(HostArrays tensors) : tensors_(std::move(tensors)) {}
  bool has(const std::string& layer) const { return tensors_.contains(layer + ".weight"); }
  int64_t outputs(const std::string& layer) const { return dim(layer, 0); }
  int64_t inputs(const std::string& layer) const { return dim(layer, 1); }

 private:
  int64_t dim(const std::string& layer, size_t i) const {
    const auto found = tensors_.find(layer + ".weight");
    return found != tensors_.end() && found->second.dims().size() == 4 ? found->second.dims()[i] : 0;
  }
  HostArrays tensors_;
};

/// Levels of one half of an AutoencoderTiny, whose layers begin at `layers` with a convolution.
struct Levels {
  std::vector<int64_t> widths, blocks;
};
Levels levels_of(const Convolutions& c, const std::string& layers, int64_t first, bool upsamples) {
  Levels all;
  const auto name = [&](int64_t i) { return layers + std::to_string(i); };
  for (int64_t at = first;; ++at) {
    int64_t blocks = 0;
    for (; c.has(name(at) + ".conv.0"); ++at) ++blocks;
    all.blocks.push_back(blocks);
    if (blocks > 0) all.widths.push_back(c.outputs(name(at - 1) + ".conv.0"));
    if (upsamples && !c.has(name(at))) ++at;
    if (!c.has(name(at + 1) + ".conv.0")) break;
  }
  return all;
}

std::string of_images(const Convolutions& c) {
  const Levels encoder = levels_of(c, "encoder.layers.", 1, false), decoder = levels_of(c, "decoder.layers.", 2, true);
  const bool pooled = c.has("decoder.layers.2.pool.0");
  const json config = {{"_class_name", "AutoencoderTiny"},
                       {"encoder_block_out_channels", encoder.widths},
                       {"num_encoder_blocks", encoder.blocks},
                       {"decoder_block_out_channels", decoder.widths},
                       {"num_decoder_blocks", decoder.blocks},
                       {"latent_channels", c.inputs("decoder.layers.0")},
                       {"use_midblock_gn", pooled},
                       {"patch_size", pooled ? 2 : 1}};  // FLUX.2's denoiser has 2×2 latents in a cell
  return config.dump(2) + "\n";
}

std::string of_videos(const Convolutions& c, bool images) {
  const auto name = [](const char* half, int64_t i) { return half + std::to_string(i); };
  std::vector<bool> down, up;
  for (int64_t i = 2; c.has(name("encoder.", i) + ".conv"); i += 5) {
    const std::string layer = name("encoder.", i) + ".conv";
    down.push_back(c.inputs(layer) > c.outputs(layer));
  }
  std::vector<int64_t> widths = {c.outputs("decoder.1")};
  int64_t behind = 8;  // the number of a level's last convolution
  for (; c.has(name("decoder.", behind - 1) + ".conv"); behind += 6) {
    const std::string layer = name("decoder.", behind - 1) + ".conv";
    up.push_back(c.outputs(layer) > c.inputs(layer));
    widths.push_back(c.outputs(name("decoder.", behind)));
  }
  const json config = {{"_class_name", "TAEHV"},
                       {"latent_channels", c.inputs("decoder.1")},
                       {"patch_size", std::llround(std::sqrt(c.inputs("encoder.0") / 3.0))},
                       {"encoder_width", c.outputs("encoder.0")},
                       {"decoder_widths", widths},
                       {"encoder_time_downscale", down},
                       {"decoder_time_upscale", up},
                       {"images", images}};
  return config.dump(2) + "\n";
}

}  // namespace

std::string tiny_autoencoder_config(const std::string& path, bool images) {
  const Convolutions c(SafetensorsReader::open(path).tensors());
  check(!c.has("decoder.1.conv.1"), Code::invalid_config,
        "'{}' is a TAEHV of the variant 'super'; expected the plain one, as taew2_2.safetensors", path);
  if (c.has("decoder.layers.0") && c.has("encoder.layers.1.conv.0")) return of_images(c);
  if (c.has("decoder.1") && c.has("decoder.3.conv.0") && c.has("decoder.7.conv") && c.has("encoder.0"))
    return of_videos(c, images);
  return "";
}

}  // namespace md
