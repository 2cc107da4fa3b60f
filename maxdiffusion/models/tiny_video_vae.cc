#include "maxdiffusion/models/tiny_video_vae.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/latent_patches.h"
#include "maxdiffusion/models/resnet_block.h"
#include "maxdiffusion/nn/causal.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

using Config = TinyVideoVaeConfig;
using nn::FrameMemory;
using nn::per_frame;

constexpr int64_t kBlocks = 3;  // of a level
constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

/// The layers of a torch Sequential, numbered as it numbers them; x is [B, F, h, w, C].
class Layers {
 public:
  explicit Layers(const Scope& s) : s_(s) {}
  Tensor conv(Tensor x, const nn::Conv2dOptions& o) { return frames(s_ / next_++, x, o); }
  /// A layer without parameters.
  void skip() { ++next_; }
  /// Three convolutions with a residual of each frame and the frame before it; zeros precede a video.
  Tensor block(Tensor x, FrameMemory& memory) {
    const Scope s = s_ / next_++ / "conv";
    const int64_t f = x.dim(1), width = x.dim(-1);
    Tensor before = memory.recall(x, 1);
    if (memory.first()) before = pad(before, 0, {0, 1, 0, 0, 0}, {0, 0, 0, 0, 0});
    Tensor h = concatenate({x, slice_axis(before, 1, 0, f)}, -1);
    for (const int64_t i : {0, 2, 4}) {
      h = frames(s / i, h, {.out = width});
      if (i < 4) h = relu(h);
    }
    return relu(h + x);
  }
  /// Joins the channels of `n` frames: [B, F, h, w, C] → [B, F/n, h, w, C].
  Tensor join_frames(Tensor x, int64_t n) {
    const int64_t b = x.dim(0), f = x.dim(1) / n, h = x.dim(2), w = x.dim(3), c = x.dim(4);
    x = reshape(transpose(reshape(x, {b, f, n, h, w, c}), {0, 1, 3, 4, 2, 5}), {b, f, h, w, n * c});
    return frames(s_ / next_++ / "conv", x, {.out = c, .kernel = 1, .padding = 0, .bias = false});
  }
  /// The inverse: [B, F, h, w, C] → [B, n·F, h, w, C].
  Tensor split_frames(Tensor x, int64_t n) {
    const int64_t b = x.dim(0), f = x.dim(1), h = x.dim(2), w = x.dim(3), c = x.dim(4);
    x = frames(s_ / next_++ / "conv", x, {.out = n * c, .kernel = 1, .padding = 0, .bias = false});
    return reshape(transpose(reshape(x, {b, f, h, w, n, c}), {0, 1, 4, 2, 3, 5}), {b, n * f, h, w, c});
  }

 private:
  static Tensor frames(const Scope& s, Tensor x, const nn::Conv2dOptions& o) {
    return per_frame(x, [&](Tensor frame) { return annotated_conv(s, frame, o, false); });
  }
  const Scope s_;
  int64_t next_ = 0;
};

class TinyVideoAutoencoder final : public Autoencoder {
 public:
  explicit TinyVideoAutoencoder(const Config& config) : config_(config) {
    channels = config.latent_channels, downscale = config.downscale();
    frame_scale = config.images ? 0 : config.frame_scale();
    encodes_whole = true;
  }
  Posterior encode(const Models& models, Tensor pixels, MediaState* state) const override {
    check(!state || state->empty(), Code::invalid_graph, "TAEHV: encodes a chunk of a video; expected whole videos");
    if (config_.images) pixels = expand_dims(pixels, 1);
    const Tensor latents = cast(tiny_video_vae_encode(models(component), config_, pixels), DType::f32);
    return {config_.images ? squeeze(latents, 1) : latents, {}};
  }
  Tensor decode(const Models& models, Tensor latents, MediaState* state) const override {
    if (!config_.images) return tiny_video_vae_decode(models(component), config_, latents, state);
    return squeeze(tiny_video_vae_decode(models(component), config_, expand_dims(latents, 1)), 1);
  }

 private:
  Config config_;
};

}  // namespace

int64_t Config::frame_scale() const { return int64_t{1} << std::ranges::count(decoder_time_upscale, true); }

Config Config::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "TAEHV config");
  Config c;
  c.latent_channels = r.get("latent_channels", c.latent_channels);
  c.patch_size = r.get("patch_size", c.patch_size);
  c.encoder_width = r.get("encoder_width", c.encoder_width);
  c.decoder_widths = r.get("decoder_widths", c.decoder_widths);
  c.encoder_time_downscale = r.get("encoder_time_downscale", c.encoder_time_downscale);
  c.decoder_time_upscale = r.get("decoder_time_upscale", c.decoder_time_upscale);
  c.images = r.get("images", c.images);
  r.finish();
  const size_t levels = c.encoder_time_downscale.size();
  check(levels > 0 && c.decoder_time_upscale.size() == levels && c.decoder_widths.size() == levels + 1 &&
            std::ranges::count(c.encoder_time_downscale, true) == std::ranges::count(c.decoder_time_upscale, true),
        Code::invalid_config,
        "{}: 'encoder_time_downscale' has {} levels, 'decoder_time_upscale' {}, 'decoder_widths' {}; expected n, n "
        "with as "
        "many true, and n + 1",
        r.what(), levels, c.decoder_time_upscale.size(), c.decoder_widths.size());
  r.positive({{"latent_channels", c.latent_channels},
              {"patch_size", c.patch_size},
              {"encoder_width", c.encoder_width},
              {"decoder_widths", std::ranges::min(c.decoder_widths)}});
  return c;
}

Tensor tiny_video_vae_encode(const Scope& root, const Config& c, Tensor pixels) {
  auto path = root.path_scope();
  const int64_t side = c.downscale(), scale = c.frame_scale();
  check(pixels.rank() == 5 && pixels.dim(-1) == 3 && pixels.dim(2) % side == 0 && pixels.dim(3) % side == 0 &&
            pixels.dim(1) % scale == (scale > 1 ? 1 : 0),
        Code::invalid_graph,
        "TAEHV: pixels are {}, expected [B, F, H, W, 3] with F one more than a multiple of {} and H and W multiples of "
        "{}",
        to_string(pixels.shape()), scale, side);
  const Tensor last = slice_axis(pixels, 1, pixels.dim(1) - 1, kAll);
  std::vector<Tensor> frames(static_cast<size_t>(scale), last);
  frames[0] = pixels;
  FrameMemory memory;
  Layers layers(root / "encoder");
  Tensor h = cast((concatenate(frames, 1) + 1.0) * 0.5, root.dtype());
  h = per_frame(h, [&c](Tensor frame) { return to_latent_patches(frame, c.patch_size); });
  h = relu(layers.conv(h, {.out = c.encoder_width}));
  layers.skip();
  for (const bool halves : c.encoder_time_downscale) {
    h = layers.join_frames(h, halves ? 2 : 1);
    h = layers.conv(h, {.out = c.encoder_width, .stride = 2, .bias = false});
    for (int64_t i = 0; i < kBlocks; ++i) h = layers.block(h, memory);
  }
  return layers.conv(h, {.out = c.latent_channels});
}

Tensor tiny_video_vae_decode(const Scope& root, const Config& c, Tensor latents, MediaState* state) {
  auto path = root.path_scope();
  check(latents.rank() == 5 && latents.dim(-1) == c.latent_channels, Code::invalid_graph,
        "TAEHV: latents are {}, expected [B, F, h, w, {}]", to_string(latents.shape()), c.latent_channels);
  FrameMemory memory(state ? *state : MediaState{});
  Layers layers(root / "decoder");
  layers.skip();
  Tensor h = cast(tanh(latents * (1.0 / 3)) * 3.0, root.dtype());
  h = relu(layers.conv(h, {.out = c.decoder_widths[0]}));
  layers.skip();
  for (size_t level = 0; level < c.decoder_time_upscale.size(); ++level) {
    for (int64_t i = 0; i < kBlocks; ++i) h = layers.block(h, memory);
    layers.skip();
    // Before the pixels are repeated: the same, in a quarter of the work.
    h = layers.split_frames(h, c.decoder_time_upscale[level] ? 2 : 1);
    h = per_frame(h, [](Tensor frame) { return nn::upsample_nearest(frame); });
    h = layers.conv(h, {.out = c.decoder_widths[level + 1], .bias = false});
  }
  layers.skip();
  h = layers.conv(relu(h), {.out = 3 * c.patch_size * c.patch_size});
  h = per_frame(h, [&c](Tensor frame) { return from_latent_patches(frame, c.patch_size); });
  // What precedes the first frame's own.
  if (memory.first()) h = slice_axis(h, 1, c.frame_scale() - 1, kAll);
  if (state) *state = memory.cache();
  return clamp(cast(h, DType::f32), 0, 1) * 2.0 - 1.0;
}

void trace_tiny_video_vae(const Scope& s, const Config& c) {
  const int64_t side = c.downscale();
  tiny_video_vae_decode(s, c, tiny_video_vae_encode(s, c, full(s.graph(), 0, {DType::f32, {1, 1, side, side, 3}})));
}

std::shared_ptr<Autoencoder> tiny_video_autoencoder(const Config& c) {
  return std::make_shared<TinyVideoAutoencoder>(c);
}

}  // namespace md
