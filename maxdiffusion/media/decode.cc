#include "maxdiffusion/media/decode.h"

#include <cstring>
#include <memory>
#include <string_view>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/video_library.h"

namespace md {
namespace {

constexpr int64_t kMaxPixels = 200'000'000;  // 600 MB as RGB; above any camera's

/// The first frame; transparent pixels over white.
DecodedImage decode_by_libav(std::string_view bytes, const std::string& name) {
  const std::unique_ptr<VideoReader> reader = video_library().open(bytes, name, 1);
  const ImageSize size = reader->size();
  check_image_size(size.height, size.width, name);
  const std::unique_ptr<VideoFrame> frame = reader->next();
  check(frame != nullptr, Code::io, "{}: it holds no image", name);
  DecodedImage p{.rgb = HostArray(Shape{DType::u8, {size.height, size.width, 3}}), .size = {size.height, size.width}};
  frame->rgb(p.rgb.mutable_view<uint8_t>().data());
  return p;
}

}  // namespace

void check_image_size(int64_t height, int64_t width, const std::string& name) {
  check(height > 0 && width > 0 && height <= kMaxPixels / width, Code::io,
        "{}: the header claims {}x{} pixels; expected 1 to {} in all", name, width, height, kMaxPixels);
}

DecodedImage from_rgba(const HostArray& rgba, bool apart) {
  const Shape shape{DType::u8, {rgba.dims()[0], rgba.dims()[1], 3}};
  DecodedImage p{.rgb = HostArray(shape), .size = {rgba.dims()[0], rgba.dims()[1]}};
  if (apart) p.alpha = HostArray(shape);
  const auto from = rgba.view<uint8_t>();
  auto to = p.rgb.mutable_view<uint8_t>();
  for (size_t i = 0; i < from.size() / 4; ++i) {
    const int alpha = apart ? 255 : from[i * 4 + 3];
    for (size_t c = 0; c < 3; ++c)
      to[i * 3 + c] = static_cast<uint8_t>((from[i * 4 + c] * alpha + 255 * (255 - alpha) + 127) / 255);
  }
  if (!apart) return p;
  auto mask = p.alpha.mutable_view<uint8_t>();
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = from[i / 3 * 4 + 3];
  return p;
}

DecodedImage decode_stored_image(const void* data, size_t size, const std::string& name, const DecodeOptions& options) {
  const std::span<const uint8_t> bytes(static_cast<const uint8_t*>(data), size);
  const std::string_view text(static_cast<const char*>(data), size);
  check(size > 0, Code::io, "{}: the file is empty", name);
  if (text.starts_with("\x89PNG\r\n\x1a\n")) return decode_png(bytes, name, options);
  if (text.starts_with("\xff\xd8\xff")) return decode_jpeg(bytes, name, options);
  if (text.starts_with("RIFF") && text.size() >= 12 && text.substr(8, 4) == "WEBP")
    return decode_webp(bytes, name, options);
  if (text.starts_with("GIF8") || text.starts_with("BM") || text.starts_with(std::string_view("II*\0", 4)) ||
      text.starts_with(std::string_view("MM\0*", 4)) ||
      (text.size() >= 12 && (text.substr(4, 8) == "ftypavif" || text.substr(4, 8) == "ftypavis")))
    return decode_by_libav(text, name);
  std::string start;
  for (uint8_t b : bytes.first(std::min<size_t>(size, 8)))
    start += fmt::format("{}{:02x}", start.empty() ? "" : " ", b);
  fail(Code::io, "{}: not a PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF image (starts with {})", name, start);
}

HostArray decode_image_bytes(const void* data, size_t size, const std::string& name, int64_t side) {
  return decode_stored_image(data, size, name, {.side = side}).rgb;
}

HostArray decode_image(const std::string& file) {
  const MappedFile m = map_file(file);
  return decode_image_bytes(m.data, m.size, file);
}

}  // namespace md
