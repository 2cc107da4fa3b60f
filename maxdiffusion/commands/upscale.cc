// `upscale`: enlarges an image's file by an upscaler's network, or by Lanczos.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/config/flow.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/model_folder/upscaler_file.h"
#include "maxdiffusion/pipelines/upscaling.h"
#include "maxdiffusion/runtime/hardware_keys.h"

namespace md {
namespace {

struct UpscaleKeys {
  std::string upscaler, hardware = "cpu", plugin;
  std::optional<double> upscale;
  int64_t upscaler_tile = SampleKeys().upscaler_tile;
  template <class V>
  void visit(V&& v) {
    v("upscaler", upscaler, ".safetensors file of ESRGAN or Real-ESRGAN (RRDBNet); empty: Lanczos enlarges",
      KeyPath::input);
    v("upscale", upscale, "how many times as large; null: as the network enlarges, by Lanczos 2");
    v("upscaler_tile", upscaler_tile, "side of the tiles, pixels, a multiple of 16; 0: the whole image at once",
      at_least(0));
    v("hardware", hardware, "cpu, gpu or tpu");
    v("plugin", plugin, "path of a PJRT plugin; empty: the one of `hardware`", KeyPath::input);
  }
};

/// An upscaler's network on one device.
class UpscalerFile {
 public:
  explicit UpscalerFile(const UpscaleKeys& keys) : devices_(open(keys)), tile_(keys.upscaler_tile) {
    constexpr const char* kName = "upscaler";
    ModelFolder folder;
    folder.add_component(kName, keys.upscaler, upscaler_config(keys.upscaler));
    facts_ = folder.autoencoder(kName);
    const ParamTable params = folder.params(kName);
    HostArrays weights = open_component(params, kName, *OpenedWeights::open(keys.upscaler), keys.upscaler,
                                        {.weight_names = folder.weight_names(kName)})();
    network_.emplace(devices_, facts_, std::move(weights), devices_.mesh().devices(), ScopeOptions(), CompileConfig());
  }
  Upscaler upscaler() { return {facts_, *network_, tile_}; }

 private:
  static Devices open(const UpscaleKeys& keys) {
    HardwareKeys hardware;
    hardware.hardware = keys.hardware, hardware.plugin = keys.plugin;
    return open_devices(hardware, MeshConfig(), ShardingKeys(), "");
  }
  Devices devices_;
  int64_t tile_;
  std::shared_ptr<const Autoencoder> facts_;
  std::optional<MediaAutoencoder> network_;
};

/// The texts of the enlarged image: its parameters, and settings that generate it again.
PngTexts texts_of_enlarged(PngTexts texts, double factor, const UpscaleKeys& keys) {
  const std::string by = keys.upscaler.empty() ? "Lanczos" : std::filesystem::path(keys.upscaler).stem().string();
  if (const auto parameters = texts.find("parameters"); parameters != texts.end()) {
    std::string& text = parameters->second;
    const size_t at = std::min(text.rfind(", Image: "), text.size());
    text.insert(at, ", " + enlargement_text(factor, by));
  }
  if (const auto settings = texts.find(kImageSettings); settings != texts.end()) {
    std::string& text = settings->second;
    if (text.find("\nupscale: ") != text.npos) {  // it is enlarged for the second time
      texts.erase(settings);
    } else {
      text += fmt::format("upscale: {}\nupscaler_tile: {}\n", factor, keys.upscaler_tile);
      if (!keys.upscaler.empty())
        text += "upscaler: " + quoted(std::filesystem::absolute(keys.upscaler).lexically_normal().string()) + "\n";
    }
  }
  return texts;
}

void upscale(const Words& words) {
  UpscaleKeys keys;
  const Words files = take_keys(words, keys);
  check(files.size() == 2, Code::invalid_config,
        "upscale: {} files are given; expected the image and the PNG file to write, as in upscale small.png large.png "
        "upscaler=FILE.safetensors",
        files.size());
  const std::string &from = files[0], &to = files[1];
  check(to.ends_with(".png"), Code::invalid_config,
        "upscale: '{}' is to be written; expected a name that ends with .png", to);
  check(!exists(to), Code::io, "'{}' exists; expected the name of a new file", to);
  check_upscaler_tile(keys.upscaler_tile);
  constexpr double kLeast = 1, kMost = 8;
  check(!keys.upscale || (*keys.upscale >= kLeast && *keys.upscale <= kMost), Code::invalid_config,
        "upscale is {}; expected {} to {}", keys.upscale.value_or(1), kLeast, kMost);
  const std::string bytes = read_file(from);
  const HostArray small = decode_image_bytes(bytes.data(), bytes.size(), from);
  std::optional<UpscalerFile> file;
  std::optional<Upscaler> upscaler;
  if (!keys.upscaler.empty()) {
    file.emplace(keys);
    upscaler.emplace(file->upscaler());
  }
  const double factor = keys.upscale.value_or(upscaler ? static_cast<double>(upscaler->facts->downscale) : 2);
  const auto side = [&](size_t axis) { return std::llround(static_cast<double>(small.dims()[axis]) * factor); };
  PngTexts texts;
  if (bytes.starts_with("\x89PNG"))
    texts = png_texts({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, from);
  write_png(to, enlarged(small, side(0), side(1), upscaler ? &*upscaler : nullptr),
            texts_of_enlarged(std::move(texts), factor, keys));
  fmt::print("{}: {}x{} pixels\n", to, side(1), side(0));
}

}  // namespace

Command upscale_command() {
  return {"upscale", "IMAGE OUT.png [upscaler=FILE] [key=value …]", "enlarge an image's file", upscale,
          [](const KeyPrinter& print) { print_command_keys<UpscaleKeys>(print); }};
}

}  // namespace md
