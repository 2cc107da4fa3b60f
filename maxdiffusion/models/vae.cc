#include "maxdiffusion/models/vae.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/resnet_block.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr double kEps = 1e-6;

Tensor resnet(const Scope& s, Tensor x, const VaeConfig& c, int64_t out) {
  const ResnetOptions o{.out = out, .groups = c.norm_num_groups, .eps = kEps, .act = c.act_fn, .annotated = false};
  return nn::remat(
      s, [&](Tensor y) { return resnet_block(s, y, {}, o); }, x);
}

/// One head over all pixels, with a residual.
Tensor local_attention(const Scope& s, Tensor x, const VaeConfig& c) {
  auto path = s.path_scope();
  Tensor n = reshape(nn::group_norm(s / "group_norm", x, c.norm_num_groups, kEps, "", false),
                     {x.dim(0), x.dim(1) * x.dim(2), x.dim(3)});
  Tensor y = nn::multi_head_attention(s, n, n, {.heads = 1, .qkv_bias = true, .annotated = false});
  return x + reshape(y, x.dims());
}

Tensor mid(const Scope& s, Tensor h, const VaeConfig& c) {
  h = resnet(s / "resnets.0", h, c, h.dim(-1));
  if (c.mid_block_add_attention) h = local_attention(s / "attentions.0", h, c);
  return resnet(s / "resnets.1", h, c, h.dim(-1));
}

Tensor out(const Scope& s, Tensor h, const VaeConfig& c, int64_t channels) {
  h = nn::group_norm(s / "conv_norm_out", h, c.norm_num_groups, kEps, "silu", false);
  return annotated_conv(s / "conv_out", h, {.out = channels}, false);
}

Tensor conv1x1(const Scope& s, Tensor x) {
  return annotated_conv(s, x, {.out = x.dim(-1), .kernel = 1, .padding = 0}, false);
}

class KlAutoencoder final : public Autoencoder {
 public:
  explicit KlAutoencoder(const VaeConfig& config) : config_(config) {
    channels = config.latent_channels, downscale = config.downscale();
    decoder_tile = config.sample_size / downscale;
    latent_scale = {{config.shift_factor}, {config.scaling_factor}};
  }
  Posterior encode(const Models& models, Tensor pixels, MediaState*) const override {
    return vae_encode(models(component), config_, pixels);
  }
  Tensor decode(const Models& models, Tensor latents, MediaState*) const override {
    return cast(vae_decode(models(component), config_, latents), DType::f32);
  }
  /// Sets scaling_factor to 1 / the latents' standard deviation (Rombach et al. 2022, appendix G).
  nlohmann::json with_measured_latent_scale(nlohmann::json config, const EachMoments& each) const override {
    const MeanAndStd spread = mean_and_std(each);
    const double scale = 1 / spread.deviation;
    config["scaling_factor"] = scale;
    if (const auto shift = config.find("shift_factor"); shift != config.end() && !shift->is_null()) {
      *shift = spread.mean;
      log_info("autoencoder: shift_factor {:.5f}, scaling_factor {:.5f}", spread.mean, scale);
    } else {
      log_info("autoencoder: scaling_factor {:.5f} (one over the latents' standard deviation)", scale);
    }
    return config;
  }

 private:
  VaeConfig config_;
};

}  // namespace

VaeConfig VaeConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "AutoencoderKL config");
  VaeConfig c;
  c.in_channels = r.get("in_channels", c.in_channels);
  c.out_channels = r.get("out_channels", c.out_channels);
  c.latent_channels = r.get("latent_channels", c.latent_channels);
  c.layers_per_block = r.get("layers_per_block", c.layers_per_block);
  c.norm_num_groups = r.get("norm_num_groups", c.norm_num_groups);
  c.block_out_channels = r.get("block_out_channels", c.block_out_channels);
  c.down_block_types = r.get<std::vector<std::string>>("down_block_types", {"DownEncoderBlock2D"});
  c.up_block_types = r.get<std::vector<std::string>>("up_block_types", {"UpDecoderBlock2D"});
  c.act_fn = r.get("act_fn", c.act_fn);
  c.scaling_factor = r.get("scaling_factor", c.scaling_factor);
  c.shift_factor = r.get("shift_factor", c.shift_factor);
  c.use_quant_conv = r.get("use_quant_conv", c.use_quant_conv);
  c.use_post_quant_conv = r.get("use_post_quant_conv", c.use_post_quant_conv);
  c.mid_block_add_attention = r.get("mid_block_add_attention", c.mid_block_add_attention);
  c.force_upcast = r.get("force_upcast", c.force_upcast);
  c.sample_size = r.get<int64_t>("sample_size", 32);
  r.neutral("latents_mean");
  r.neutral("latents_std");
  r.finish();

  auto require_types = [&](const char* key, const std::vector<std::string>& types, const char* known) {
    check(types.size() == c.block_out_channels.size(), Code::invalid_config,
          "{}: '{}' has {} entries, 'block_out_channels' has {}", r.what(), key, types.size(),
          c.block_out_channels.size());
    for (const auto& t : types)
      check(t == known, Code::invalid_config, "{}: '{}' holds '{}', expected {}", r.what(), key, t, known);
  };
  check(!c.block_out_channels.empty(), Code::invalid_config, "{}: 'block_out_channels' is empty", r.what());
  require_types("down_block_types", c.down_block_types, "DownEncoderBlock2D");
  require_types("up_block_types", c.up_block_types, "UpDecoderBlock2D");
  for (int64_t width : c.block_out_channels)
    check(c.norm_num_groups > 0 && width > 0 && width % c.norm_num_groups == 0, Code::invalid_config,
          "{}: 'block_out_channels' holds {}, which 'norm_num_groups' {} does not divide", r.what(), width,
          c.norm_num_groups);
  check(c.layers_per_block > 0, Code::invalid_config, "{}: 'layers_per_block' is {}, expected at least 1", r.what(),
        c.layers_per_block);
  return c;
}

Posterior vae_encode(const Scope& root, const VaeConfig& c, Tensor pixels) {
  auto path = root.path_scope();
  check(pixels.rank() == 4 && pixels.dim(-1) == c.in_channels && pixels.dim(1) % c.downscale() == 0 &&
            pixels.dim(2) % c.downscale() == 0,
        Code::invalid_graph, "vae: pixels are {}, expected [B, H, W, {}] with H and W multiples of {}",
        to_string(pixels.shape()), c.in_channels, c.downscale());
  const Scope s = root / "encoder";
  const size_t levels = c.block_out_channels.size();
  Tensor h = annotated_conv(s / "conv_in", cast(pixels, s.dtype()), {.out = c.block_out_channels[0]}, false);
  for (size_t level = 0; level < levels; ++level) {
    const Scope block = s / fmt::format("down_blocks.{}", level);
    for (int64_t i = 0; i < c.layers_per_block; ++i)
      h = resnet(block / "resnets" / i, h, c, c.block_out_channels[level]);
    if (level + 1 < levels) h = downsample(block, h, 0, false);
  }
  h = out(s, mid(s / "mid_block", h, c), c, 2 * c.latent_channels);
  if (c.use_quant_conv) h = conv1x1(root / "quant_conv", h);
  h = cast(h, DType::f32);
  return {.mean = slice_axis(h, -1, 0, c.latent_channels),
          .logvar = clamp(slice_axis(h, -1, c.latent_channels, 2 * c.latent_channels), -30, 20)};
}

Tensor vae_decode(const Scope& root, const VaeConfig& c, Tensor latents) {
  auto path = root.path_scope();
  check(latents.rank() == 4 && latents.dim(-1) == c.latent_channels, Code::invalid_graph,
        "vae: latents are {}, expected [B, h, w, {}]", to_string(latents.shape()), c.latent_channels);
  const Scope s = root / "decoder";
  const size_t levels = c.block_out_channels.size();
  Tensor h = cast(latents, s.dtype());
  if (c.use_post_quant_conv) h = conv1x1(root / "post_quant_conv", h);
  h = annotated_conv(s / "conv_in", h, {.out = c.block_out_channels.back()}, false);
  h = mid(s / "mid_block", h, c);
  for (size_t i = 0; i < levels; ++i) {
    const Scope block = s / fmt::format("up_blocks.{}", i);
    const int64_t width = c.block_out_channels[levels - 1 - i];
    for (int64_t k = 0; k < c.layers_per_block + 1; ++k) h = resnet(block / "resnets" / k, h, c, width);
    if (i + 1 < levels) h = upsample(block, h, 2 * h.dim(1), 2 * h.dim(2), false);
  }
  return out(s, h, c, c.out_channels);
}

std::shared_ptr<Autoencoder> kl_autoencoder(const VaeConfig& c) { return std::make_shared<KlAutoencoder>(c); }

void trace_vae(const Scope& s, const VaeConfig& c) {
  const int64_t side = c.downscale();
  vae_decode(s, c, vae_encode(s, c, full(s.graph(), 0, {DType::f32, {1, side, side, c.in_channels}})).mean);
}

}  // namespace md
