#include "maxdiffusion/media/decode.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/orientation.h"
#include "maxdiffusion/media/video_library.h"

namespace md {
namespace {

constexpr int64_t kMaxPixels = 200'000'000;  // 600 MB as RGB; above any camera's
constexpr int64_t kMaxSide = 65'535;         // JPEG's; filters and tables grow with sides, however few pixels there are

/// The first frame; transparent pixels over white.
DecodedImage decode_by_libav(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions&) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::unique_ptr<VideoReader> reader = video_library().open(text, name, 1, true);
  const ImageSize size = reader->size();
  check_image_size(size.height, size.width, name);
  const std::unique_ptr<VideoFrame> frame = reader->next();
  check(frame != nullptr, Code::io, "{}: it holds no image", name);
  DecodedImage p{.rgb = HostArray(Shape{DType::u8, {size.height, size.width, 3}}), .size = {size.height, size.width}};
  frame->rgb(p.rgb.mutable_view<uint8_t>().data());
  return p;
}

/// A format whose files have `signature` at byte `at`, and start with `start`.
struct Format {
  std::string_view start, signature;
  size_t at;
  DecodedImage (*decode)(std::span<const uint8_t>, const std::string&, const DecodeOptions&);
};
constexpr Format kFormats[] = {
    {"", "\x89PNG\r\n\x1a\n", 0, decode_png}, {"", "\xff\xd8\xff", 0, decode_jpeg},
    {"RIFF", "WEBP", 8, decode_webp},         {"", "GIF8", 0, decode_by_libav},
    {"", "BM", 0, decode_by_libav},           {"", {"II*\0", 4}, 0, decode_by_libav},
    {"", {"MM\0*", 4}, 0, decode_by_libav},   {"", "ftypavif", 4, decode_by_libav},
    {"", "ftypavis", 4, decode_by_libav},
};
const Format* format_of(std::string_view bytes) {
  const auto* const found = std::ranges::find_if(kFormats, [&](const Format& f) {
    return bytes.starts_with(f.start) && bytes.size() >= f.at && bytes.substr(f.at).starts_with(f.signature);
  });
  return found == std::end(kFormats) ? nullptr : found;
}

}  // namespace

void check_image_size(int64_t height, int64_t width, const std::string& name) {
  check(height > 0 && width > 0 && height <= kMaxPixels / width, Code::io,
        "{}: the header claims {}x{} pixels; expected 1 to {} in all", name, width, height, kMaxPixels);
  check(height <= kMaxSide && width <= kMaxSide, Code::io,
        "{}: the header claims {}x{} pixels; expected sides of at most {}", name, width, height, kMaxSide);
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
  const std::string_view text(static_cast<const char*>(data), size);
  check(size > 0, Code::io, "{}: the file is empty", name);
  const Format* format = format_of(text);
  if (!format) {
    std::string start;
    for (const char c : text.substr(0, 8))
      start += fmt::format("{}{:02x}", start.empty() ? "" : " ", static_cast<uint8_t>(c));
    fail(Code::io, "{}: not a PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF image (starts with {})", name, start);
  }
  const std::span<const uint8_t> bytes(static_cast<const uint8_t*>(data), size);
  DecodedImage image = format->decode(bytes, name, options);
  const int orientation = stored_orientation(bytes);
  if (orientation >= 5) std::swap(image.size.height, image.size.width);
  image.rgb = upright(std::move(image.rgb), orientation);
  image.alpha = upright(std::move(image.alpha), orientation);
  return image;
}

bool has_image_signature(std::string_view bytes) { return format_of(bytes) != nullptr; }

HostArray decode_image_bytes(const void* data, size_t size, const std::string& name, int64_t side) {
  return decode_stored_image(data, size, name, {.side = side}).rgb;
}

HostArray decode_image(const std::string& file) {
  const MappedFile m = map_file(file);
  return decode_image_bytes(m.data, m.size, file);
}

}  // namespace md
