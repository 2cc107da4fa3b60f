// WebP, lossy and lossless; of an animation the first frame.
#include <webp/decode.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/media/animated_webp.h"
#include "maxdiffusion/media/decode.h"

namespace md {
namespace {

const char* reason(VP8StatusCode status) {
  switch (status) {
    case VP8_STATUS_OK: return "ok";
    case VP8_STATUS_OUT_OF_MEMORY: return "out of memory";
    case VP8_STATUS_INVALID_PARAM: return "invalid parameter";
    case VP8_STATUS_BITSTREAM_ERROR: return "corrupt data";
    case VP8_STATUS_UNSUPPORTED_FEATURE: return "unsupported feature";
    case VP8_STATUS_SUSPENDED:
    case VP8_STATUS_NOT_ENOUGH_DATA: return "the file is truncated";
    case VP8_STATUS_USER_ABORT: return "aborted";
  }
  return "unknown error";
}

}  // namespace

DecodedImage decode_webp(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options) {
  WebPDecoderConfig config;
  check(WebPInitDecoderConfig(&config) != 0, Code::internal, "libwebp's version differs from its header's");
  VP8StatusCode status = WebPGetFeatures(bytes.data(), bytes.size(), &config.input);
  check(status == VP8_STATUS_OK, Code::io, "{}: WebP: {}", name, reason(status));
  const int64_t h = config.input.height, w = config.input.width, channels = config.input.has_alpha ? 4 : 3;
  check_image_size(h, w, name);
  if (options.only_size) return {.size = {h, w}};
  if (config.input.has_animation) {
    const auto frames = open_animated_webp({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, name);
    const auto first = frames->next();
    check(first != nullptr, Code::io, "{}: WebP: the animation has no frame", name);
    HostArray rgb(Shape{DType::u8, {h, w, 3}});
    first->rgb(rgb.mutable_view<uint8_t>().data());
    return {.rgb = std::move(rgb), .size = {h, w}};
  }
  HostArray pixels(Shape{DType::u8, {h, w, channels}});
  config.output.colorspace = channels == 4 ? MODE_RGBA : MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA = {
      .rgba = pixels.mutable_view<uint8_t>().data(), .stride = static_cast<int>(w * channels), .size = pixels.bytes()};
  status = WebPDecode(bytes.data(), bytes.size(), &config);
  check(status == VP8_STATUS_OK, Code::io, "{}: WebP: {}", name, reason(status));
  if (channels == 4) return from_rgba(pixels, options.alpha);
  return {.rgb = std::move(pixels), .size = {h, w}};
}

}  // namespace md
