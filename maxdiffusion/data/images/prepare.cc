#include "maxdiffusion/data/images/prepare.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/data/images/image_rows.h"
#include "maxdiffusion/data/records/shuffle.h"
#include "maxdiffusion/media/decode_video.h"
#include "maxdiffusion/media/resize.h"

namespace md {
namespace {

/// The longest side that an image can be asked for.
int64_t longest_side(const ImageConfig& c) {
  int64_t side = c.resolution;
  if (c.buckets)
    for (const ImageSize& s : c.buckets->sizes()) side = std::max({side, s.height, s.width});
  return side;
}

HostArray fitted(const HostArray& rgb, const Fit& f, bool flip) {
  HostArray out = resize_rgb8(rgb, f.resized.height, f.resized.width);
  if (f.resized.height != f.size.height || f.resized.width != f.size.width)
    out = crop_rgb8(out, f.top, f.left, f.size.height, f.size.width);
  return flip ? flip_rgb8(out) : out;
}

/// Means over cells of `cell` × `cell` pixels, of 255.
HostArray weights_of(const HostArray& rgb, int64_t cell) {
  const int64_t h = rgb.dims()[0] / cell, w = rgb.dims()[1] / cell;
  check(h * cell == rgb.dims()[0] && w * cell == rgb.dims()[1], Code::invalid_config,
        "masks: {}x{} pixels do not divide into latents of {}x{} pixels", rgb.dims()[1], rgb.dims()[0], cell, cell);
  HostArray out(Shape{DType::f32, {h, w, 1}});
  const auto from = rgb.view<uint8_t>();
  auto to = out.mutable_view<float>();
  for (int64_t y = 0; y < h; ++y)
    for (int64_t x = 0; x < w; ++x) {
      int64_t sum = 0;
      for (int64_t i = y * cell; i < (y + 1) * cell; ++i)
        for (int64_t k = x * cell; k < (x + 1) * cell; ++k)
          sum += from[static_cast<size_t>((i * rgb.dims()[1] + k) * 3)];
      to[static_cast<size_t>(y * w + x)] =
          static_cast<float>(static_cast<double>(sum) / static_cast<double>(255 * cell * cell));
    }
  return out;
}

HostArray ones(Dims dims) {
  HostArray a(Shape{DType::f32, std::move(dims)});
  std::ranges::fill(a.mutable_view<float>(), 1.0f);
  return a;
}

HostArray mask_of(const Record& r, const DecodedImage& decoded, const ImageConfig& c, const Fit& fit, bool flip) {
  const int64_t cell = c.mask_downscale;
  if (c.mask == MaskFrom::alpha) {
    if (!decoded.alpha) return ones({fit.size.height / cell, fit.size.width / cell, 1});
    return weights_of(fitted(decoded.alpha, fit, flip), cell);
  }
  check(!r.mask.bytes.empty(), Code::invalid_config, "{}: no mask", r.name);
  const std::string name = "mask of " + r.name;
  const DecodedImage mask =
      decode_stored_image(r.mask.bytes.data(), r.mask.bytes.size(), name, {.side = longest_side(c)});
  check(mask.size == decoded.size, Code::invalid_config, "{}: it has {} pixels; expected {}, the image's size", name,
        to_string(mask.size), to_string(decoded.size));
  return weights_of(fitted(mask.rgb, fit, flip), cell);
}

HostArray time_ids(ImageSize original, const Fit& f, bool flip) {
  const int64_t left = flip ? mirrored_left(f) : f.left;
  HostArray a(Shape{DType::f32, {6}});
  auto v = a.mutable_view<float>();
  size_t i = 0;
  for (int64_t n : {original.height, original.width, f.top, left, f.size.height, f.size.width})
    v[i++] = static_cast<float>(n);
  return a;
}

std::unique_ptr<VideoReader> open_clip(const Record& r, const ClipConfig& c) {
  check(r.fault.empty(), Code::io, "{}", r.fault);
  check(!r.pixels, Code::invalid_config, "{}: an image without frames; expected a clip", r.name);
  return r.frames.empty() ? open_video(r.image.bytes, r.name, c.threads) : open_image_sequence(r.frames, r.name, c.fps);
}

/// With as many frames as it has at the requested rate.
ImageSize size_of_clip(const VideoReader& video, const ClipConfig& c) {
  ImageSize size = video.size();
  size.frames = frames_in(video.times(), c.fps);
  return size;
}

PreparedImage prepare_clip(const Record& record, const ImageConfig& config, const Placement& placement) {
  const ClipConfig& clip = *config.clip;
  const auto video = open_clip(record, clip);
  const ImageSize stored = size_of_clip(*video, clip);
  PreparedImage r{.arrays = {}, .fit = resize_and_crop_of_record(record, stored, config, placement)};
  const ImageSize& size = r.fit.size;
  const int64_t over = stored.frames - size.frames;
  check(over >= 0, Code::io, "{}: it has {} of {} frames at {} per second", record.name, stored.frames, size.frames,
        clip.fps);
  const auto first = std::min(over, static_cast<int64_t>(placement.time * static_cast<double>(over + 1)));
  const double start =
      clip.fps > 0 ? static_cast<double>(first) / clip.fps : video->times()[static_cast<size_t>(first)];
  HostArray pixels(Shape{DType::u8, {size.frames, size.height, size.width, 3}});
  HostArray frame(Shape{DType::u8, {stored.height, stored.width, 3}});
  std::byte* to = pixels.mutable_data();
  const int64_t n =
      each_frame(*video, {.fps = clip.fps, .start = start, .most = size.frames}, [&](const VideoFrame& f) {
        f.rgb(frame.mutable_view<uint8_t>().data());
        const HostArray fit = fitted(frame, r.fit, placement.flip);
        to = std::copy_n(fit.data(), fit.bytes(), to);
      });
  check(n == size.frames, Code::io, "{}: only {} of {} frames decode", record.name, n, size.frames);
  r.arrays["pixels"] = std::move(pixels);
  if (config.sizes) r.arrays["time_ids"] = time_ids(stored, r.fit, placement.flip);
  return r;
}

}  // namespace

int64_t mirrored_left(const Fit& f) { return f.resized.width - f.size.width - f.left; }

Fit resize_and_crop(ImageSize image, const ImageConfig& config, const Placement& placement) {
  const int64_t h = image.height, w = image.width, r = config.resolution;
  const int64_t frames = config.clip ? config.clip->frames : 1;
  Fit f{.resized = {r, r, frames}, .size = {r, r, frames}};
  if (config.buckets) {
    const AspectBuckets::Choice choice = config.buckets->choose(image);
    f = {.resized = choice.resized, .size = choice.size};
  } else if (config.center_crop || config.random_crop) {
    f.resized = h <= w ? ImageSize{r, r * w / h, frames} : ImageSize{r * h / w, r, frames};
  }
  // torchvision: the long side is cut to a whole number; the centre's offset is rounded half to even, a random one is
  // any with the same probability.
  const auto offset = [&](int64_t over, double place) {
    const auto last = static_cast<double>(over);
    return static_cast<int64_t>(config.random_crop ? std::min(std::floor((last + 1) * place), last)
                                                   : std::nearbyint(last * place));
  };
  f.top = offset(f.resized.height - f.size.height, placement.y);
  f.left = offset(f.resized.width - f.size.width, placement.x);
  return f;
}

HostArray fit_image(const HostArray& rgb, const ImageConfig& config, const Placement& placement) {
  return fitted(rgb, resize_and_crop({rgb.dims()[0], rgb.dims()[1]}, config, placement), placement.flip);
}

void check_image_config(const ImageConfig& c) {
  check(c.resolution > 0, Code::invalid_config, "resolution: {}; expected > 0", c.resolution);
  check(!(c.center_crop && c.random_crop), Code::invalid_config, "center_crop and random_crop exclude each other");
  check(!c.clip || c.mask == MaskFrom::none, Code::invalid_config,
        "masked_loss, alpha_mask: set for clips; expected images: clips have no masks");
  check(!c.clip || c.clip->frames > 0, Code::invalid_config, "frames of a clip: {}; expected > 0",
        c.clip ? c.clip->frames : 0);
}

DecodedImage decode_record(const Record& r, const ImageConfig& c, bool only_size) {
  if (c.clip) return {.size = size_of_clip(*open_clip(r, *c.clip), *c.clip)};
  check(r.fault.empty(), Code::io, "{}", r.fault);
  if (r.pixels) return {.rgb = r.pixels, .size = {r.pixels.dims()[0], r.pixels.dims()[1]}};
  return decode_stored_image(
      r.image.bytes.data(), r.image.bytes.size(), r.name,
      {.side = only_size ? 0 : longest_side(c), .alpha = c.mask == MaskFrom::alpha, .only_size = only_size});
}

Fit resize_and_crop_of_record(const Record& r, ImageSize size, const ImageConfig& config, const Placement& placement) {
  try {
    return resize_and_crop(size, config, placement);
  } catch (const Error& e) {
    fail(e.code(), "{}: {}", r.name, e.message());
  }
}

PreparedImage prepare_image(const Record& record, const ImageConfig& config, const Placement& placement) {
  if (config.clip) return prepare_clip(record, config, placement);
  const DecodedImage decoded = decode_record(record, config);
  PreparedImage r{.arrays = {}, .fit = resize_and_crop_of_record(record, decoded.size, config, placement)};
  r.arrays["pixels"] = fitted(decoded.rgb, r.fit, placement.flip);
  if (config.mask != MaskFrom::none) r.arrays["mask"] = mask_of(record, decoded, config, r.fit, placement.flip);
  if (config.sizes) r.arrays["time_ids"] = time_ids(decoded.size, r.fit, placement.flip);
  return r;
}

Placement random_placement(const ImageConfig& config, uint64_t bits) {
  const auto uniform = [&] { return static_cast<double>((bits = mix(bits)) >> 11) * 0x1p-53; };
  Placement p;
  const bool flip = uniform() < 0.5;
  p.flip = config.random_flip && flip;
  if (config.random_crop) p.y = uniform(), p.x = uniform();
  if (config.clip && config.clip->random_start) p.time = uniform();
  return p;
}

}  // namespace md
