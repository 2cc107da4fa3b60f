#include "maxdiffusion/models/tiny_vae.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/latent_patches.h"
#include "maxdiffusion/models/resnet_block.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {
namespace {

/// The layers of a torch Sequential, numbered as it numbers them.
class Layers {
 public:
  Layers(const Scope& s, const TinyVaeConfig& c) : s_(s / "layers"), c_(c) {}
  Tensor conv(Tensor x, const nn::Conv2dOptions& o) { return annotated_conv(s_ / next_++, x, o, false); }
  /// A layer without parameters.
  void skip() { ++next_; }
  /// Three convolutions with a residual. `pooled`: whether x + norm(x) is what it reads, in four times the channels.
  Tensor block(Tensor x, bool pooled) {
    const Scope s = s_ / next_++;
    if (pooled) {
      constexpr int64_t kGroups = 4;
      const Scope pool = s / "pool";
      auto pointwise = [&pool](int64_t i, Tensor y, int64_t out) {
        return annotated_conv(pool / i, y, {.out = out, .kernel = 1, .padding = 0, .bias = false}, false);
      };
      const Tensor wide = pointwise(0, x, kGroups * x.dim(-1));
      x = x + pointwise(3, nn::group_norm(pool / 1, wide, kGroups, 1e-5, "relu", false), x.dim(-1));
    }
    auto conv = [&](int64_t i, Tensor y) { return annotated_conv(s / "conv" / i, y, {.out = x.dim(-1)}, false); };
    auto act = [&](Tensor y) { return nn::activation(c_.act_fn, y); };
    return relu(conv(4, act(conv(2, act(conv(0, x))))) + x);
  }

 private:
  const Scope s_;
  const TinyVaeConfig& c_;
  int64_t next_ = 0;
};

class TinyAutoencoder final : public Autoencoder {
 public:
  explicit TinyAutoencoder(const TinyVaeConfig& config) : config_(config) {
    const int64_t patch = config.patch_size;
    channels = config.latent_channels * patch * patch, downscale = config.downscale() * patch;
    other_published_latents = patch > 1;
    latent_scale = {{config.shift_factor}, {config.scaling_factor}};
  }
  Posterior encode(const Models& models, Tensor pixels, MediaState*) const override {
    const Tensor latents = tiny_vae_encode(models(component), config_, pixels);
    return {cast(to_latent_patches(latents, config_.patch_size), DType::f32), {}};
  }
  Tensor decode(const Models& models, Tensor latents, MediaState*) const override {
    return cast(tiny_vae_decode(models(component), config_, published_latents(models, latents)), DType::f32);
  }
  Tensor published_latents(const Models&, Tensor latents) const override {
    return from_latent_patches(cast(latents, DType::f32), config_.patch_size);
  }

 private:
  TinyVaeConfig config_;
};

}  // namespace

TinyVaeConfig TinyVaeConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "AutoencoderTiny config");
  TinyVaeConfig c;
  c.in_channels = r.get("in_channels", c.in_channels);
  c.out_channels = r.get("out_channels", c.out_channels);
  c.latent_channels = r.get("latent_channels", c.latent_channels);
  c.encoder_widths = r.get("encoder_block_out_channels", c.encoder_widths);
  c.decoder_widths = r.get("decoder_block_out_channels", c.decoder_widths);
  c.encoder_blocks = r.get("num_encoder_blocks", c.encoder_blocks);
  c.decoder_blocks = r.get("num_decoder_blocks", c.decoder_blocks);
  c.act_fn = r.get("act_fn", c.act_fn);
  c.scaling_factor = r.get("scaling_factor", c.scaling_factor);
  c.shift_factor = r.get("shift_factor", c.shift_factor);
  c.use_midblock_gn = r.get("use_midblock_gn", c.use_midblock_gn);
  c.patch_size = r.get("patch_size", c.patch_size);
  r.neutral("upsample_fn", {"nearest"});
  r.neutral("upsampling_scaling_factor", {2});
  // Of another range of the latents, which pipelines do not use; and a copy of decoder_block_out_channels.
  r.ignore({"latent_magnitude", "latent_shift", "force_upcast", "block_out_channels"});
  r.finish();
  check(c.scaling_factor != 0, Code::invalid_config, "{}: 'scaling_factor' is 0; expected another number", r.what());
  for (const auto& [key, blocks, widths] : {std::tuple{"num_encoder_blocks", &c.encoder_blocks, &c.encoder_widths},
                                            std::tuple{"num_decoder_blocks", &c.decoder_blocks, &c.decoder_widths}}) {
    check(!widths->empty() && widths->size() == c.decoder_widths.size() && blocks->size() == widths->size(),
          Code::invalid_config, "{}: '{}' has {} entries for {} widths and {} of the decoder; expected equal numbers",
          r.what(), key, blocks->size(), widths->size(), c.decoder_widths.size());
    for (size_t i = 0; i < blocks->size(); ++i)
      check((*widths)[i] > 0 && (*widths)[i] == widths->front() && (*blocks)[i] >= 0, Code::invalid_config,
            "{}: level {} has {} blocks of width {}; expected 0 or more, and the width of the first level", r.what(), i,
            (*blocks)[i], (*widths)[i]);
  }
  r.positive({{"in_channels", c.in_channels},
              {"out_channels", c.out_channels},
              {"latent_channels", c.latent_channels},
              {"patch_size", c.patch_size}});
  return c;
}

Tensor tiny_vae_encode(const Scope& root, const TinyVaeConfig& c, Tensor pixels) {
  auto path = root.path_scope();
  check(pixels.rank() == 4 && pixels.dim(-1) == c.in_channels && pixels.dim(1) % c.downscale() == 0 &&
            pixels.dim(2) % c.downscale() == 0,
        Code::invalid_graph, "tiny vae: pixels are {}, expected [B, H, W, {}] with H and W multiples of {}",
        to_string(pixels.shape()), c.in_channels, c.downscale());
  Layers layers(root / "encoder", c);
  Tensor h = cast((pixels + 1.0) * 0.5, root.dtype());
  for (size_t level = 0; level < c.encoder_widths.size(); ++level) {
    const bool first = level == 0;
    h = layers.conv(h, {.out = c.encoder_widths[level], .stride = first ? 1 : 2, .bias = first});
    const bool pooled = c.use_midblock_gn && level + 1 == c.encoder_widths.size();
    for (int64_t i = 0; i < c.encoder_blocks[level]; ++i) h = layers.block(h, pooled);
  }
  return layers.conv(h, {.out = c.latent_channels});
}

Tensor tiny_vae_decode(const Scope& root, const TinyVaeConfig& c, Tensor latents) {
  auto path = root.path_scope();
  check(latents.rank() == 4 && latents.dim(-1) == c.latent_channels, Code::invalid_graph,
        "tiny vae: latents are {}, expected [B, h, w, {}]", to_string(latents.shape()), c.latent_channels);
  Layers layers(root / "decoder", c);
  const size_t levels = c.decoder_widths.size();
  Tensor h = cast(tanh(latents * (1.0 / 3)) * 3.0, root.dtype());
  h = nn::activation(c.act_fn, layers.conv(h, {.out = c.decoder_widths[0]}));
  layers.skip();
  for (size_t level = 0; level < levels; ++level) {
    const bool last = level + 1 == levels;
    for (int64_t i = 0; i < c.decoder_blocks[level]; ++i) h = layers.block(h, c.use_midblock_gn && level == 0);
    if (!last) {
      h = nn::upsample_nearest(h);
      layers.skip();
    }
    h = layers.conv(h, {.out = last ? c.out_channels : c.decoder_widths[level], .bias = last});
  }
  return h * 2.0 - 1.0;
}

void trace_tiny_vae(const Scope& s, const TinyVaeConfig& c) {
  const int64_t side = c.downscale();
  tiny_vae_decode(s, c, tiny_vae_encode(s, c, full(s.graph(), 0, {DType::f32, {1, side, side, c.in_channels}})));
}

std::shared_ptr<Autoencoder> tiny_autoencoder(const TinyVaeConfig& c) { return std::make_shared<TinyAutoencoder>(c); }

}  // namespace md
