#include "maxdiffusion/pipelines/upscaling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/encoders/tiles.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/resize.h"

namespace md {
namespace {

/// Enlarges once. Sides that the network does not take are extended by repeating the last pixels, and cut again.
HostArray once(const HostArray& rgb, const Upscaler& u) {
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1], multiple = u.facts->decoder_multiple, scale = u.facts->downscale;
  const auto whole = [&](int64_t side) { return (side + multiple - 1) / multiple * multiple; };
  HostArray in(Shape{DType::f32, {1, whole(h), whole(w), 3}});
  const auto from = rgb.view<uint8_t>();
  auto to = in.mutable_view<float>().begin();
  for (int64_t y = 0; y < whole(h); ++y)
    for (int64_t x = 0; x < whole(w); ++x)
      for (int64_t c = 0; c < 3; ++c)
        *to++ = static_cast<float>(
            from[static_cast<size_t>((std::min(y, h - 1) * w + std::min(x, w - 1)) * 3 + c)] / 127.5 - 1);
  const auto decode = [&](const HostArray& part) { return u.network.decode(part); };
  const bool tiled = u.tile > 0 && std::max(whole(h), whole(w)) > u.tile;
  const HostArray out = tiled ? decode_in_tiles(in, u.tile, scale, decode) : decode(in);
  return crop_rgb8(image_of_batch(out, 0), 0, 0, h * scale, w * scale);
}

}  // namespace

void check_upscaler_tile(int64_t tile) {
  check(tile % 16 == 0, Code::invalid_config, "upscaler_tile is {}; expected a multiple of 16, or 0 for whole images",
        tile);
}

std::string enlargement_text(double factor, const std::string& by) {
  return fmt::format("Postprocess upscale by: {}, Postprocess upscaler: {}", factor, by);
}

HostArray enlarged(const HostArray& rgb, int64_t height, int64_t width, const Upscaler* upscaler) {
  HostArray out = rgb;
  while (upscaler && upscaler->facts->downscale > 1 && (out.dims()[0] < height || out.dims()[1] < width))
    out = once(out, *upscaler);
  return resize_rgb8(out, height, width, Filter::lanczos);
}

HostArray resized_latents(const HostArray& latents, int64_t height, int64_t width) {
  const Dims& d = latents.dims();
  HostArray out(Shape{DType::f32, {d[0], height, width, d[3]}});
  struct Between {
    int64_t low, high;
    double part;  // of `high`
  };
  const auto between = [](int64_t i, int64_t from, int64_t to) -> Between {
    const double at =
        std::max(0.0, (static_cast<double>(i) + 0.5) * static_cast<double>(from) / static_cast<double>(to) - 0.5);
    const auto low = std::min(static_cast<int64_t>(at), from - 1);
    return {low, std::min(low + 1, from - 1), at - static_cast<double>(low)};
  };
  const auto v = latents.view<float>();
  auto to = out.mutable_view<float>().begin();
  for (int64_t n = 0; n < d[0]; ++n)
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x) {
        const Between a = between(y, d[1], height), b = between(x, d[2], width);
        for (int64_t c = 0; c < d[3]; ++c) {
          const auto cell = [&](int64_t i, int64_t j) {
            return static_cast<double>(v[static_cast<size_t>(((n * d[1] + i) * d[2] + j) * d[3] + c)]);
          };
          const double top = cell(a.low, b.low) * (1 - b.part) + cell(a.low, b.high) * b.part,
                       bottom = cell(a.high, b.low) * (1 - b.part) + cell(a.high, b.high) * b.part;
          *to++ = static_cast<float>(top * (1 - a.part) + bottom * a.part);
        }
      }
  return out;
}

}  // namespace md
