#include "maxdiffusion/models/controlnet.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// The image's features, with the latents' size and the width of the UNet's first features.
Tensor embedding(const Scope& s, const ControlNetConfig& c, Tensor x) {
  const auto& widths = c.conditioning_embedding_out_channels;
  x = silu(nn::conv2d(s / "conv_in", x, {.out = widths[0]}));
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    const int64_t first = static_cast<int64_t>(2 * i);
    x = silu(nn::conv2d(s / "blocks" / first, x, {.out = widths[i]}));
    x = silu(nn::conv2d(s / "blocks" / (first + 1), x, {.out = widths[i + 1], .stride = 2}));
  }
  return nn::conv2d(s / "conv_out", x, {.out = c.unet.block_out_channels[0]});
}

}  // namespace

ControlNetConfig ControlNetConfig::from_json(const nlohmann::json& config) {
  constexpr const char* kControlNetFields[] = {"conditioning_channels", "conditioning_embedding_out_channels",
                                               "controlnet_conditioning_channel_order", "global_pool_conditions"};
  nlohmann::json controlnet = nlohmann::json::object(), unet = config;
  for (const char* name : kControlNetFields) {
    if (config.contains(name)) controlnet[name] = config[name];
    unet.erase(name);
  }
  ConfigReader r(controlnet, "ControlNetModel config");
  ControlNetConfig c;
  c.conditioning_channels = r.get("conditioning_channels", c.conditioning_channels);
  c.conditioning_embedding_out_channels =
      r.get("conditioning_embedding_out_channels", c.conditioning_embedding_out_channels);
  check(!c.conditioning_embedding_out_channels.empty(), Code::invalid_config,
        "{}: 'conditioning_embedding_out_channels' is empty", r.what());
  const auto order = r.get<std::string>("controlnet_conditioning_channel_order", "rgb");
  check(order == "rgb" || order == "bgr", Code::invalid_config,
        "{}: 'controlnet_conditioning_channel_order' is '{}', which is not one of: rgb, bgr", r.what(), order);
  c.bgr = order == "bgr";
  c.global_pool_conditions = r.get("global_pool_conditions", false);
  r.finish();
  // A ControlNet has no up blocks; the UNet's reader requires matching ones.
  if (unet.contains("down_block_types") && unet["down_block_types"].is_array()) {
    unet["up_block_types"] = nlohmann::json::array();
    for (const auto& type : unet["down_block_types"])
      unet["up_block_types"].push_back(type == "CrossAttnDownBlock2D" ? "CrossAttnUpBlock2D" : "UpBlock2D");
  }
  c.unet = UNetConfig::from_json(unet);
  return c;
}

ControlResiduals controlnet(const Scope& s, const ControlNetConfig& c, const UNetInputs& in, Tensor image) {
  auto path = s.path_scope();
  check(image.rank() == 4 && image.dim(1) == in.sample.dim(1) * c.downscale() &&
            image.dim(2) == in.sample.dim(2) * c.downscale() && image.dim(3) == c.conditioning_channels,
        Code::invalid_graph, "controlnet: the image is {}; latents {} need [B, {}, {}, {}]", to_string(image.shape()),
        to_string(in.sample.shape()), in.sample.dim(1) * c.downscale(), in.sample.dim(2) * c.downscale(),
        c.conditioning_channels);
  if (c.bgr) image = reverse(image, {3});
  const UNetFeatures f =
      unet2d_features(s, c.unet, in, embedding(s / "controlnet_cond_embedding", c, cast(image, s.dtype())));
  auto residual = [&](const Scope& at, Tensor x) {
    x = nn::conv2d(at, x, {.out = x.dim(-1), .kernel = 1, .padding = 0});
    return c.global_pool_conditions ? mean(x, {1, 2}, true) : x;
  };
  ControlResiduals out;
  for (size_t i = 0; i < f.skips.size(); ++i)
    out.down.push_back(residual(s / "controlnet_down_blocks" / static_cast<int64_t>(i), f.skips[i]));
  out.mid = residual(s / "controlnet_mid_block", f.mid);
  return out;
}

void trace_controlnet(const Scope& s, const ControlNetConfig& c) {
  const UNetInputs in = smallest_unet_inputs(s.graph(), c.unet);
  const int64_t side = in.sample.dim(1) * c.downscale();
  controlnet(s, c, in, full(s.graph(), 0, {DType::f32, {1, side, side, c.conditioning_channels}}));
}

}  // namespace md
