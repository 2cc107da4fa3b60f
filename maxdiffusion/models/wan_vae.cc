#include "maxdiffusion/models/wan_vae.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/causal.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

using nn::FrameMemory;
using nn::per_frame;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

Tensor norm_silu(const Scope& s, Tensor x) { return nn::unit_norm(s, x, 3, "silu"); }

Tensor conv(const Scope& s, Tensor x, int64_t out, FrameMemory& memory) {
  return nn::causal_conv3d(s, x, {.out = out}, memory);
}

Tensor pointwise(const Scope& s, Tensor x, int64_t out) {
  return nn::conv3d(s, x, {.out = out, .kernel = {1, 1, 1}, .pad_low = {}, .pad_high = {}});
}

// ---- blocks

/// norm1, SiLU, conv1, norm2, SiLU, conv2, + x (through conv_shortcut where the widths differ).
Tensor resnet(const Scope& s, Tensor x, int64_t out, FrameMemory& memory) {
  auto path = s.path_scope();
  Tensor h = conv(s / "conv1", norm_silu(s / "norm1", x), out, memory);
  h = conv(s / "conv2", norm_silu(s / "norm2", h), out, memory);
  return (x.dim(-1) == out ? x : pointwise(s / "conv_shortcut", x, out)) + h;
}

/// One head over the pixels of each frame, with a residual.
Tensor local_attention(const Scope& s, Tensor x) {
  auto path = s.path_scope();
  return x + per_frame(x, [&s](Tensor frame) {
           const int64_t n = frame.dim(0), length = frame.dim(1) * frame.dim(2), c = frame.dim(3);
           Tensor qkv = nn::conv2d(s / "to_qkv", nn::unit_norm(s / "norm", frame, 2),
                                   {.out = 3 * c, .kernel = 1, .padding = 0, .in_axis = ""});
           const std::vector<Tensor> parts = split(reshape(qkv, {n, length, 1, 3 * c}), 3, -1);
           Tensor y = attention(parts[0], parts[1], parts[2], nn::attention_options(s));
           return nn::conv2d(s / "proj", reshape(y, frame.dims()),
                             {.out = c, .kernel = 1, .padding = 0, .out_axis = ""});
         });
}

Tensor mid(const Scope& s, Tensor h, FrameMemory& memory) {
  h = resnet(s / "resnets.0", h, h.dim(-1), memory);
  h = local_attention(s / "attentions.0", h);
  return resnet(s / "resnets.1", h, h.dim(-1), memory);
}

/// Half the height and width and, if `frames`, half the frames; the first frame of a video stays one.
Tensor downsample(const Scope& s, Tensor x, bool frames, FrameMemory& memory) {
  auto path = s.path_scope();
  x = per_frame(x, [&s](Tensor frame) {
    return nn::conv2d(s / "resample.1", frame,
                      {.out = frame.dim(-1), .stride = 2, .in_axis = "", .pad_right_bottom = true});
  });
  if (!frames) return x;
  Tensor with_history = memory.recall(x, 1);
  if (with_history.dim(1) == 1) return with_history;
  Tensor halved =
      nn::conv3d(s / "time_conv", with_history,
                 {.out = x.dim(-1), .kernel = {3, 1, 1}, .stride = {2, 1, 1}, .pad_low = {}, .pad_high = {}});
  return memory.first() ? concatenate({slice_axis(x, 1, 0, 1), halved}, 1) : halved;
}

/// Doubles the frames: the convolution's channels are those of the first frame, then of the second.
Tensor double_frames(const Scope& s, Tensor x, FrameMemory& memory) {
  const int64_t b = x.dim(0), f = x.dim(1), h = x.dim(2), w = x.dim(3), c = x.dim(4);
  Tensor y = nn::causal_conv3d(s, x, {.out = 2 * c, .kernel = {3, 1, 1}}, memory);
  return reshape(transpose(reshape(y, {b, f, h, w, 2, c}), {0, 1, 4, 2, 3, 5}), {b, 2 * f, h, w, c});
}

/// Twice the height and width, `out` channels and, if `frames`, twice the frames; the first frame of a video stays one,
/// and skips the temporal convolution.
Tensor upsample(const Scope& s, Tensor x, int64_t out, bool frames, FrameMemory& memory) {
  auto path = s.path_scope();
  if (frames) {
    const Scope time = s / "time_conv";
    if (!memory.first()) {
      x = double_frames(time, x, memory);
    } else if (x.dim(1) == 1) {
      memory.start(x, 2);
    } else {
      x = concatenate({slice_axis(x, 1, 0, 1), double_frames(time, slice_axis(x, 1, 1, kAll), memory)}, 1);
    }
  }
  return per_frame(x, [&](Tensor frame) {
    return nn::conv2d(s / "resample.1", nn::upsample_nearest(frame), {.out = out, .in_axis = ""});
  });
}

/// Means over blocks of `ft` frames, fs × fs pixels and adjacent channels; no parameters. If the frames of a first
/// chunk are not divisible, zeros are prepended.
Tensor average_down(Tensor x, int64_t out, int64_t ft, int64_t fs) {
  check(x.dim(-1) * ft * fs * fs % out == 0, Code::invalid_config,
        "wan vae: {} channels in blocks of {}x{}x{} cannot be averaged to {}", x.dim(-1), ft, fs, fs, out);
  if (const int64_t short_of = (ft - x.dim(1) % ft) % ft; short_of > 0)
    x = pad(x, 0, {0, short_of, 0, 0, 0}, {0, 0, 0, 0, 0});
  const int64_t b = x.dim(0), f = x.dim(1) / ft, h = x.dim(2) / fs, w = x.dim(3) / fs, c = x.dim(4);
  x = transpose(reshape(x, {b, f, ft, h, fs, w, fs, c}), {0, 1, 3, 5, 7, 2, 4, 6});
  return mean(reshape(x, {b, f, h, w, out, c * ft * fs * fs / out}), {-1});
}

/// The inverse: channels become blocks of frames and pixels, repeated if there are too few. Of a video's first frame
/// only the last of its `ft` copies is kept.
Tensor repeat_up(Tensor x, int64_t out, int64_t ft, int64_t fs, bool first) {
  const int64_t b = x.dim(0), f = x.dim(1), h = x.dim(2), w = x.dim(3), c = x.dim(4), times = out * ft * fs * fs / c;
  check(times * c == out * ft * fs * fs, Code::invalid_config,
        "wan vae: {} channels cannot be repeated to blocks of {}x{}x{} of {}", c, ft, fs, fs, out);
  x = reshape(broadcast_in_dim(x, {b, f, h, w, c, times}, {0, 1, 2, 3, 4}), {b, f, h, w, out, ft, fs, fs});
  x = reshape(transpose(x, {0, 1, 5, 2, 6, 3, 7, 4}), {b, f * ft, h * fs, w * fs, out});
  return first ? slice_axis(x, 1, ft - 1, kAll) : x;
}

/// [B, F, H, W, C] ⇄ [B, F, H/p, W/p, C·p·p]; within the channels, the column offset varies slower than the row offset.
Tensor patchify(Tensor x, int64_t p) {
  const int64_t b = x.dim(0), f = x.dim(1), h = x.dim(2) / p, w = x.dim(3) / p, c = x.dim(4);
  return reshape(transpose(reshape(x, {b, f, h, p, w, p, c}), {0, 1, 2, 4, 6, 5, 3}), {b, f, h, w, c * p * p});
}
Tensor unpatchify(Tensor x, int64_t p) {
  const int64_t b = x.dim(0), f = x.dim(1), h = x.dim(2), w = x.dim(3), c = x.dim(4) / (p * p);
  return reshape(transpose(reshape(x, {b, f, h, w, c, p, p}), {0, 1, 2, 6, 3, 5, 4}), {b, f, h * p, w * p, c});
}

Tensor out(const Scope& s, Tensor h, int64_t channels, FrameMemory& memory) {
  return conv(s / "conv_out", norm_silu(s / "norm_out", h), channels, memory);
}

// ---- levels

/// Blocks of all levels are in one list; all levels but the last end with downsampling.
Tensor encode_levels(const Scope& s, const WanVaeConfig& c, Tensor h, FrameMemory& memory) {
  int64_t block = 0;
  double scale = 1;
  for (size_t level = 0; level < c.dim_mult.size(); ++level, scale /= 2) {
    const bool attention = std::ranges::find(c.attn_scales, scale) != c.attn_scales.end();
    for (int64_t i = 0; i < c.num_res_blocks; ++i) {
      h = resnet(s / block++, h, c.base_dim * c.dim_mult[level], memory);
      if (attention) h = local_attention(s / block++, h);
    }
    if (level + 1 < c.dim_mult.size()) h = downsample(s / block++, h, c.temperal_downsample[level], memory);
  }
  return h;
}

Tensor encode_residual_levels(const Scope& s, const WanVaeConfig& c, Tensor h, FrameMemory& memory) {
  for (size_t level = 0; level < c.dim_mult.size(); ++level) {
    const Scope block = s / static_cast<int64_t>(level);
    const bool last = level + 1 == c.dim_mult.size(), frames = !last && c.temperal_downsample[level];
    const int64_t width = c.base_dim * c.dim_mult[level];
    Tensor shortcut = average_down(h, width, frames ? 2 : 1, last ? 1 : 2);
    for (int64_t i = 0; i < c.num_res_blocks; ++i) h = resnet(block / "resnets" / i, h, width, memory);
    if (!last) h = downsample(block / "downsampler", h, frames, memory);
    h = h + shortcut;
  }
  return h;
}

Tensor decode_levels(const Scope& s, const WanVaeConfig& c, Tensor h, FrameMemory& memory) {
  const size_t levels = c.dim_mult.size();
  for (size_t i = 0; i < levels; ++i) {
    const Scope block = s / static_cast<int64_t>(i);
    const bool last = i + 1 == levels, frames = !last && c.temperal_downsample[levels - 2 - i];
    const int64_t width = c.decoder_base_dim * c.dim_mult[levels - 1 - i];
    Tensor shortcut;
    if (c.is_residual && !last) shortcut = repeat_up(h, width, frames ? 2 : 1, 2, memory.first());
    for (int64_t k = 0; k < c.num_res_blocks + 1; ++k) h = resnet(block / "resnets" / k, h, width, memory);
    if (!last)
      h = upsample(block / (c.is_residual ? "upsampler" : "upsamplers.0"), h, c.is_residual ? width : width / 2, frames,
                   memory);
    if (shortcut) h = h + shortcut;
  }
  return h;
}

class WanAutoencoder final : public Autoencoder {
 public:
  explicit WanAutoencoder(const WanVaeConfig& config) : config_(config) {
    channels = config.z_dim, downscale = config.downscale(), frame_scale = config.images ? 0 : config.frame_scale();
    latent_scale = {config.latents_mean, config.latents_std};
    for (double& v : latent_scale.scale) v = 1 / v;
  }
  Posterior encode(const Models& models, Tensor pixels, MediaState* state) const override {
    if (!config_.images) return wan_vae_encode(models(component), config_, pixels, state);
    const Posterior p = wan_vae_encode(models(component), config_, expand_dims(pixels, 1));
    return {squeeze(p.mean, 1), squeeze(p.logvar, 1)};
  }
  Tensor decode(const Models& models, Tensor latents, MediaState* state) const override {
    if (!config_.images) return wan_vae_decode(models(component), config_, latents, state);
    return squeeze(wan_vae_decode(models(component), config_, expand_dims(latents, 1)), 1);
  }
  /// Sets latents_mean and latents_std of each channel.
  nlohmann::json with_measured_latent_scale(nlohmann::json config, const EachMoments& each) const override {
    const auto c = static_cast<size_t>(channels);
    std::vector<double> sums(c), squares(c);
    double n = 0;  // number of positions
    each([&](const HostArray& moments) { n += static_cast<double>(moments.shape().elements()) / (2.0 * c); });
    each([&](const HostArray& moments) {
      auto v = moments.view<float>();
      for (size_t i = 0; i < v.size(); i += 2 * c)
        for (size_t k = 0; k < c; ++k) {
          const double mean = v[i + k], deviation = v[i + c + k];
          sums[k] += mean / n, squares[k] += (mean * mean + deviation * deviation) / n;
        }
    });
    for (size_t k = 0; k < c; ++k) squares[k] = std::sqrt(std::max(squares[k] - sums[k] * sums[k], 1e-12));
    config["latents_mean"] = sums;
    config["latents_std"] = squares;
    return config;
  }

 private:
  WanVaeConfig config_;
};

/// Reads the fields of all versions.
void read_levels(ConfigReader& r, WanVaeConfig& c) {
  c.base_dim = r.get("base_dim", c.base_dim);
  c.decoder_base_dim = c.base_dim;
  c.z_dim = r.get("z_dim", c.z_dim);
  c.dim_mult = r.get("dim_mult", c.dim_mult);
  c.num_res_blocks = r.get("num_res_blocks", c.num_res_blocks);
  c.attn_scales = r.get("attn_scales", c.attn_scales);
  c.temperal_downsample = r.get("temperal_downsample", c.temperal_downsample);
  r.neutral("dropout", {0.0});
  c.latents_mean =
      r.get<std::vector<double>>("latents_mean", {-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
                                                  0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921});
  c.latents_std =
      r.get<std::vector<double>>("latents_std", {2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687,
                                                 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160});
}

/// Throws invalid_config.
void check_levels(const ConfigReader& r, const WanVaeConfig& c) {
  auto positive = [&](const char* key, int64_t value) {
    check(value > 0, Code::invalid_config, "{}: '{}' holds {}, expected numbers above 0", r.what(), key, value);
  };
  check(!c.dim_mult.empty(), Code::invalid_config, "{}: 'dim_mult' is empty", r.what());
  for (int64_t m : c.dim_mult) positive("dim_mult", m);
  positive("base_dim", c.base_dim), positive("decoder_base_dim", c.decoder_base_dim), positive("z_dim", c.z_dim);
  positive("num_res_blocks", c.num_res_blocks), positive("patch_size", c.patch_size);
  check(c.temperal_downsample.size() + 1 == c.dim_mult.size(), Code::invalid_config,
        "{}: 'temperal_downsample' has {} entries, expected {}: one less than 'dim_mult'", r.what(),
        c.temperal_downsample.size(), c.dim_mult.size() - 1);
}

}  // namespace

int64_t WanVaeConfig::frame_scale() const { return int64_t{1} << std::ranges::count(temperal_downsample, true); }

WanVaeConfig WanVaeConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "AutoencoderKLWan config");
  WanVaeConfig c;
  read_levels(r, c);
  c.decoder_base_dim = r.get("decoder_base_dim", c.decoder_base_dim);
  c.is_residual = r.get("is_residual", c.is_residual);
  c.in_channels = r.get("in_channels", c.in_channels);
  c.out_channels = r.get("out_channels", c.out_channels);
  c.patch_size = r.get("patch_size", c.patch_size);
  c.scale_factor_temporal = r.get("scale_factor_temporal", c.scale_factor_temporal);
  c.scale_factor_spatial = r.get("scale_factor_spatial", c.scale_factor_spatial);
  c.clip_output = r.get("clip_output", c.clip_output);
  r.finish();
  check_levels(r, c);
  const int64_t patch = c.patch_size * c.patch_size;
  auto whole_patches = [&](const char* key, int64_t channels) {
    check(channels > 0 && channels % patch == 0, Code::invalid_config,
          "{}: '{}' is {}, expected a multiple of {}, the pixels of a patch", r.what(), key, channels, patch);
  };
  whole_patches("in_channels", c.in_channels), whole_patches("out_channels", c.out_channels);
  return c;
}

QwenImageVaeConfig QwenImageVaeConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "AutoencoderKLQwenImage config");
  QwenImageVaeConfig c;
  read_levels(r, c);
  c.in_channels = c.out_channels = r.get("input_channels", c.in_channels);
  c.images = true;
  r.finish();
  check_levels(r, c);
  r.positive({{"input_channels", c.in_channels}});
  return c;
}

Posterior wan_vae_encode(const Scope& root, const WanVaeConfig& c, Tensor pixels, MediaState* state) {
  auto path = root.path_scope();
  FrameMemory memory(state ? *state : MediaState{});
  const int64_t side = c.downscale(), channels = c.in_channels / (c.patch_size * c.patch_size);
  const int64_t before = memory.first() ? 1 : 0;
  check(pixels.rank() == 5 && pixels.dim(-1) == channels && pixels.dim(2) % side == 0 && pixels.dim(3) % side == 0 &&
            (pixels.dim(1) - before) % c.frame_scale() == 0,
        Code::invalid_graph,
        "wan vae: pixels are {}, expected [B, F, H, W, {}] with F {}a multiple of {} and H and W multiples of {}",
        to_string(pixels.shape()), channels, before ? "one more than " : "", c.frame_scale(), side);
  const Scope s = root / "encoder";
  Tensor h = conv(s / "conv_in", cast(patchify(pixels, c.patch_size), s.dtype()), c.base_dim, memory);
  h = (c.is_residual ? encode_residual_levels : encode_levels)(s / "down_blocks", c, h, memory);
  h = out(s, mid(s / "mid_block", h, memory), 2 * c.z_dim, memory);
  h = cast(pointwise(root / "quant_conv", h, 2 * c.z_dim), DType::f32);
  if (state) *state = memory.cache();
  return {.mean = slice_axis(h, -1, 0, c.z_dim), .logvar = clamp(slice_axis(h, -1, c.z_dim, 2 * c.z_dim), -30, 20)};
}

Tensor wan_vae_decode(const Scope& root, const WanVaeConfig& c, Tensor latents, MediaState* state) {
  auto path = root.path_scope();
  FrameMemory memory(state ? *state : MediaState{});
  check(latents.rank() == 5 && latents.dim(-1) == c.z_dim, Code::invalid_graph,
        "wan vae: latents are {}, expected [B, F, h, w, {}]", to_string(latents.shape()), c.z_dim);
  const Scope s = root / "decoder";
  Tensor h = pointwise(root / "post_quant_conv", cast(latents, s.dtype()), c.z_dim);
  h = conv(s / "conv_in", h, c.decoder_base_dim * c.dim_mult.back(), memory);
  h = decode_levels(s / "up_blocks", c, mid(s / "mid_block", h, memory), memory);
  h = cast(unpatchify(out(s, h, c.out_channels, memory), c.patch_size), DType::f32);
  if (state) *state = memory.cache();
  return c.clip_output ? clamp(h, -1, 1) : h;
}

std::shared_ptr<Autoencoder> wan_autoencoder(const WanVaeConfig& c) { return std::make_shared<WanAutoencoder>(c); }

void trace_wan_vae(const Scope& s, const WanVaeConfig& c) {
  const int64_t side = c.downscale(), channels = c.in_channels / (c.patch_size * c.patch_size);
  // More than one frame, because the first frame skips the temporal convolutions.
  const Shape pixels{DType::f32, {1, 1 + c.frame_scale(), side, side, channels}};
  wan_vae_decode(s, c, wan_vae_encode(s, c, full(s.graph(), 0, pixels)).mean);
}

}  // namespace md
