#include "maxdiffusion/models/rrdb_net.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/latent_patches.h"
#include "maxdiffusion/models/resnet_block.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

using Config = RrdbNetConfig;

constexpr double kResidual = 0.2, kSlope = 0.2;  // residual scaling; LeakyReLU's slope

Tensor leaky(Tensor x) { return maximum(x, x * kSlope); }

Tensor conv(const Scope& s, Tensor x, int64_t out) { return annotated_conv(s, x, {.out = out}, false); }

/// Five convolutions; each but the last adds `growth` channels to what the next ones read.
Tensor dense_block(const Scope& s, const Config& c, Tensor x) {
  Tensor all = x;
  for (int i = 1; i < 5; ++i) all = concatenate({all, leaky(conv(s / fmt::format("conv{}", i), all, c.growth))}, -1);
  return conv(s / "conv5", all, c.width) * kResidual + x;
}

class RrdbUpscaler final : public Autoencoder {
 public:
  explicit RrdbUpscaler(const Config& config) : config_(config) {
    channels = config.channels, downscale = config.scale(), decoder_multiple = config.unshuffle;
  }
  Tensor decode(const Models& models, Tensor small, MediaState*) const override {
    return cast(rrdb_net(models(component), config_, (small + 1.0) * 0.5), DType::f32) * 2.0 - 1.0;
  }

 private:
  Config config_;
};

}  // namespace

Config Config::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "RRDBNet config");
  Config c;
  c.channels = r.get("channels", c.channels);
  c.width = r.get("width", c.width);
  c.growth = r.get("growth", c.growth);
  c.blocks = r.get("blocks", c.blocks);
  c.doublings = r.get("doublings", c.doublings);
  c.unshuffle = r.get("unshuffle", c.unshuffle);
  r.finish();
  r.positive({{"width", c.width}, {"growth", c.growth}, {"blocks", c.blocks}, {"unshuffle", c.unshuffle}});
  check(c.channels == 3 && c.doublings >= 0 && c.doublings <= 4 && c.scale() >= 1 &&
            c.scale() * c.unshuffle == int64_t{1} << c.doublings,
        Code::invalid_config,
        "{}: {} channels, {} enlargements by two, squares of {} pixels; expected 3 channels, and squares of 1, 2 or 4 "
        "pixels that are enlarged at least to pixels again",
        r.what(), c.channels, c.doublings, c.unshuffle);
  return c;
}

Tensor rrdb_net(const Scope& s, const Config& c, Tensor pixels) {
  auto path = s.path_scope();
  check(pixels.rank() == 4 && pixels.dim(-1) == c.channels && pixels.dim(1) % c.unshuffle == 0 &&
            pixels.dim(2) % c.unshuffle == 0,
        Code::invalid_graph, "RRDBNet: pixels are {}, expected [B, H, W, {}] with H and W multiples of {}",
        to_string(pixels.shape()), c.channels, c.unshuffle);
  const Tensor first = conv(s / "conv_first", cast(to_latent_patches(pixels, c.unshuffle), s.dtype()), c.width);
  Tensor h = nn::repeat(s / "body", c.blocks, first, [&](const Scope& block, Tensor x) {
    Tensor y = x;
    for (int i = 1; i <= 3; ++i) y = dense_block(block / fmt::format("rdb{}", i), c, y);
    return y * kResidual + x;
  });
  h = first + conv(s / "conv_body", h, c.width);
  for (int64_t i = 1; i <= c.doublings; ++i)
    h = leaky(conv(s / fmt::format("conv_up{}", i), nn::upsample_nearest(h), c.width));
  return conv(s / "conv_last", leaky(conv(s / "conv_hr", h, c.width)), c.channels);
}

void trace_rrdb_net(const Scope& s, const Config& c) {
  rrdb_net(s, c, full(s.graph(), 0, {DType::f32, {1, c.unshuffle, c.unshuffle, c.channels}}));
}

std::shared_ptr<Autoencoder> rrdb_upscaler(const Config& c) { return std::make_shared<RrdbUpscaler>(c); }

WeightNameMap original_rrdb_names(const Config& c) {
  return {.aliases = [c](const std::string& name) -> std::vector<WeightAlias> {
    const size_t dot = name.rfind('.');
    const std::string layer = name.substr(0, dot), kind = name.substr(dot);
    // The first program numbers the layers of one Sequential: conv_first, blocks, then two or three for each doubling.
    std::map<std::string, std::pair<std::string, std::string>> names = {
        {"conv_first", {"model.0", "conv_first"}},
        {"conv_body", {fmt::format("model.1.sub.{}", c.blocks), "trunk_conv"}},
        {"conv_hr", {fmt::format("model.{}", 2 + 3 * c.doublings), "HRconv"}},
        {"conv_last", {fmt::format("model.{}", 4 + 3 * c.doublings), "conv_last"}}};
    for (int64_t i = 1; i <= c.doublings; ++i)
      names[fmt::format("conv_up{}", i)] = {fmt::format("model.{}", 3 * i), fmt::format("upconv{}", i)};
    std::pair<std::string, std::string> old;
    if (const auto found = names.find(layer); found != names.end()) {
      old = found->second;
    } else if (layer.starts_with("body.")) {  // body.0.rdb1.conv1
      std::string rest = layer.substr(5);
      rest.replace(rest.find("rdb"), 3, "RDB");
      old = {"model.1.sub." + rest + ".0", "RRDB_trunk." + rest};
    } else {
      return {};
    }
    return {{.name = old.first + kind}, {.name = old.second + kind}};
  }};
}

}  // namespace md
