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

/// The longest side that the config can request.
int64_t longest_side(const ImageConfig& c) {
  int64_t side = c.resolution;
  if (c.buckets)
    for (const ImageSize& s : c.buckets->sizes()) side = std::max({side, s.height, s.width});
  return side;
}

/// The part of `rgb` inside the record's box; the box is in pixels of the image's size `whole`.
HostArray in_box(const Record& r, const HostArray& rgb, const ImageSize& whole) {
  const CropBox& b = *r.box;
  check(b.left + b.width <= whole.width && b.top + b.height <= whole.height, Code::invalid_config,
        "{}: crop_box [{}, {}, {}, {}] is not inside of its {} pixels", r.name, b.left, b.top, b.width, b.height,
        to_string(whole));
  return rgb ? crop_rgb8(rgb, b.top, b.left, b.height, b.width) : HostArray();
}

HostArray fitted(const HostArray& rgb, const Fit& f, bool flip) {
  HostArray out = resize_rgb8(rgb, f.resized.height, f.resized.width);
  if (f.resized.height != f.size.height || f.resized.width != f.size.width)
    out = crop_rgb8(out, f.top, f.left, f.size.height, f.size.width);
  return flip ? flip_rgb8(out) : out;
}

/// Mask weights: means over cells of `cell` × `cell` pixels divided by 255, at least unmasked_weight, times
/// loss_weight.
HostArray weights_of(const HostArray& rgb, int64_t cell, const ImageConfig& c) {
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
      const double mean = static_cast<double>(sum) / static_cast<double>(255 * cell * cell);
      to[static_cast<size_t>(y * w + x)] = static_cast<float>(std::max(mean, c.unmasked_weight) * c.loss_weight);
    }
  return out;
}

HostArray constant(Dims dims, double value) {
  HostArray a(Shape{DType::f32, std::move(dims)});
  std::ranges::fill(a.mutable_view<float>(), static_cast<float>(value));
  return a;
}

/// The full size of a record's image, ignoring its box.
ImageSize decoded_whole(const Record& r) {
  return decode_stored_image(r.image.bytes.data(), r.image.bytes.size(), r.name, {.only_size = true}).size;
}

HostArray mask_of(const Record& r, const DecodedImage& decoded, const ImageConfig& c, const Fit& fit, bool flip) {
  const int64_t cell = c.mask_downscale;
  if (c.mask == MaskFrom::whole || (c.mask == MaskFrom::alpha && !decoded.alpha))
    return constant({fit.size.height / cell, fit.size.width / cell, 1}, c.loss_weight);
  if (c.mask == MaskFrom::alpha) return weights_of(fitted(decoded.alpha, fit, flip), cell, c);
  check(!r.mask.bytes.empty(), Code::invalid_config, "{}: no mask", r.name);
  const std::string name = "mask of " + r.name;
  const DecodedImage mask =
      decode_stored_image(r.mask.bytes.data(), r.mask.bytes.size(), name, {.side = r.box ? 0 : longest_side(c)});
  const ImageSize expected = r.box ? decoded_whole(r) : decoded.size;
  check(mask.size == expected, Code::invalid_config, "{}: it has {} pixels; expected {}, the image's size", name,
        to_string(mask.size), to_string(expected));
  return weights_of(fitted(r.box ? in_box(r, mask.rgb, mask.size) : mask.rgb, fit, flip), cell, c);
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

/// Reference image i of a record whose image was resized and cropped by `fit`.
HostArray reference_of(const Record& r, size_t i, const DecodedImage& image, const ImageConfig& c, const Fit& fit,
                       bool flip) {
  const std::string name = fmt::format("reference image {} of {}", i, r.name);
  const Blob& stored = r.references[i];
  const DecodedImage decoded =
      decode_stored_image(stored.bytes.data(), stored.bytes.size(), name, {.side = longest_side(c)});
  if (decoded.size == image.size) return fitted(decoded.rgb, fit, flip);
  const auto sides = [](const ImageSize& s) {
    return std::pair(static_cast<double>(s.height), static_cast<double>(s.width));
  };
  const auto [h, w] = sides(decoded.size);
  const auto [height, width] = sides(fit.size);
  const double scale = std::max(height / h, width / w);
  Fit centered{
      .resized = {std::max(fit.size.height, std::lround(h * scale)), std::max(fit.size.width, std::lround(w * scale))},
      .size = fit.size};
  centered.top = (centered.resized.height - centered.size.height) / 2,
  centered.left = (centered.resized.width - centered.size.width) / 2;
  return fitted(decoded.rgb, centered, flip);
}

std::unique_ptr<VideoReader> open_clip(const Record& r, const ClipConfig& c) {
  check(r.fault.empty(), Code::io, "{}", r.fault);
  check(!r.pixels, Code::invalid_config, "{}: an image without frames; expected a clip", r.name);
  return r.frames.empty() ? open_video(r.image.bytes, r.name, c.threads) : open_image_sequence(r.frames, r.name, c.fps);
}

/// Size of a clip inside the record's box, with the number of its frames at the requested rate.
ImageSize size_of_clip(const Record& r, const VideoReader& video, const ClipConfig& c) {
  ImageSize size = video.size();
  if (r.box) {
    in_box(r, {}, size);
    size = {r.box->height, r.box->width};
  }
  size.frames = frames_in(video.times(), c.fps);
  return size;
}

PreparedImage prepare_clip(const Record& record, const ImageConfig& config, const Placement& placement) {
  const ClipConfig& clip = *config.clip;
  const auto video = open_clip(record, clip);
  const ImageSize stored = size_of_clip(record, *video, clip);
  PreparedImage r{.arrays = {}, .fit = resize_and_crop_of_record(record, stored, config, placement)};
  const ImageSize& size = r.fit.size;
  const int64_t over = stored.frames - size.frames;
  check(over >= 0, Code::io, "{}: it has {} of {} frames at {} per second", record.name, stored.frames, size.frames,
        clip.fps);
  constexpr double kRounding = 1e-9;
  const auto first = clip.random_start
                         ? std::min(over, static_cast<int64_t>(placement.time * static_cast<double>(over + 1)))
                         : static_cast<int64_t>(clip.start * static_cast<double>(over) + kRounding);
  const double start =
      clip.fps > 0 ? static_cast<double>(first) / clip.fps : video->times()[static_cast<size_t>(first)];
  HostArray pixels(Shape{DType::u8, {size.frames, size.height, size.width, 3}});
  const ImageSize whole = video->size();
  HostArray frame(Shape{DType::u8, {whole.height, whole.width, 3}});
  std::byte* to = pixels.mutable_data();
  const int64_t n =
      each_frame(*video, {.fps = clip.fps, .start = start, .most = size.frames}, [&](const VideoFrame& f) {
        f.rgb(frame.mutable_view<uint8_t>().data());
        const HostArray fit = fitted(record.box ? in_box(record, frame, whole) : frame, r.fit, placement.flip);
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
  // As torchvision: the longer side is truncated to a whole number; the centre's offset is rounded half to even; a
  // random offset is uniform.
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
  if (c.clip) return {.size = size_of_clip(r, *open_clip(r, *c.clip), *c.clip)};
  check(r.fault.empty(), Code::io, "{}", r.fault);
  if (r.pixels) return {.rgb = r.pixels, .size = {r.pixels.dims()[0], r.pixels.dims()[1]}};
  DecodedImage d = decode_stored_image(
      r.image.bytes.data(), r.image.bytes.size(), r.name,
      {.side = only_size || r.box ? 0 : longest_side(c), .alpha = c.mask == MaskFrom::alpha, .only_size = only_size});
  if (!r.box) return d;
  d.rgb = in_box(r, d.rgb, d.size);
  if (d.alpha) d.alpha = in_box(r, d.alpha, d.size);
  d.size = {r.box->height, r.box->width};
  return d;
}

Fit resize_and_crop_of_record(const Record& r, ImageSize size, const ImageConfig& config, const Placement& placement) {
  const double shape = static_cast<double>(size.width) / static_cast<double>(std::max<int64_t>(size.height, 1));
  check(size.height * size.width >= config.least_area && std::min(size.height, size.width) >= config.least_side,
        Code::io, "{}: {} pixels, fewer than the dataset takes", r.name, to_string(size));
  check(shape >= config.least_aspect && (config.greatest_aspect == 0 || shape <= config.greatest_aspect), Code::io,
        "{}: {} pixels, an aspect ratio that the dataset does not take", r.name, to_string(size));
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
  check(std::ssize(record.references) >= config.references, Code::io, "{}: {} reference images; expected {}",
        record.name, record.references.size(), config.references);
  for (int64_t i = 0; i < config.references; ++i)
    r.arrays[fmt::format("reference_image_{}", i)] =
        reference_of(record, static_cast<size_t>(i), decoded, config, r.fit, placement.flip);
  if (config.mask != MaskFrom::none) r.arrays["mask"] = mask_of(record, decoded, config, r.fit, placement.flip);
  if (config.sizes) r.arrays["time_ids"] = time_ids(decoded.size, r.fit, placement.flip);
  return r;
}

std::string caption_of(const Record& record, const ImageConfig& config, uint64_t bits) {
  return drops_caption(config.captions, bits) ? "" : applied(config.captions, record.caption, bits, record.name);
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
