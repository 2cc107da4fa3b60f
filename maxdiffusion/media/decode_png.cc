// PNG through libpng's row interface; every colour type is converted to 8-bit RGBA. Colours stay as stored (no gamma
// correction), as in Pillow.
#include <png.h>

#include <csetjmp>
#include <cstring>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/media/decode.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

struct PngSource {
  std::span<const uint8_t> left;
  std::string error;
};

void on_error(png_structp png, png_const_charp text) {
  static_cast<PngSource*>(png_get_error_ptr(png))->error = text;
  std::longjmp(png_jmpbuf(png), 1);
}
void on_warning(png_structp, png_const_charp) {}
void on_read(png_structp png, png_bytep to, size_t size) {
  auto& left = static_cast<PngSource*>(png_get_io_ptr(png))->left;
  if (size > left.size()) png_error(png, "the file is truncated");
  std::memcpy(to, left.data(), size);
  left = left.subspan(size);
}

// Owns libpng's structures. Functions that libpng may leave by longjmp must not have local objects with destructors.
struct PngReader {
  PngSource source;
  png_structp png;
  png_infop info;

  explicit PngReader(std::span<const uint8_t> bytes)
      : source{bytes, ""},
        png(png_create_read_struct(PNG_LIBPNG_VER_STRING, &source, on_error, on_warning)),
        info(png ? png_create_info_struct(png) : nullptr) {
    check(info != nullptr, Code::internal, "libpng cannot create a reader");
    png_set_read_fn(png, &source, on_read);
    png_set_user_limits(png, 0x7fffffff, 0x7fffffff);  // check_image_size checks the size instead
  }
  ~PngReader() { png_destroy_read_struct(&png, &info, nullptr); }
  PngReader(const PngReader&) = delete;

  bool read_header() {
    if (setjmp(png_jmpbuf(png))) return false;
    png_read_info(png, info);
    return true;
  }
  bool read_pixels(uint8_t* to, size_t height, size_t stride) {
    if (setjmp(png_jmpbuf(png))) return false;
    png_set_expand(png);  // palettes, 1–4 bits, transparent colours
    png_set_scale_16(png);
    png_set_gray_to_rgb(png);
    png_set_add_alpha(png, 255, PNG_FILLER_AFTER);
    const int passes = png_set_interlace_handling(png);
    png_read_update_info(png, info);
    if (png_get_rowbytes(png, info) != stride) png_error(png, "unexpected row size");
    for (int pass = 0; pass < passes; ++pass) {
      for (size_t y = 0; y < height; ++y) png_read_row(png, to + y * stride, nullptr);
    }
    png_read_end(png, nullptr);
    return true;
  }
};

std::string from_latin1(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80)
      out += c;
    else
      out += {static_cast<char>(0xc0 | (byte >> 6)), static_cast<char>(0x80 | (byte & 0x3f))};
  }
  return out;
}

/// The file with the texts that follow its pixels, as ExifTool writes them, before the pixels. Empty: there are none.
std::vector<uint8_t> with_texts_first(std::span<const uint8_t> bytes) {
  constexpr size_t kSignature = 8, kAround = 12;  // length, type and checksum of a chunk
  size_t pixels = 0;
  std::vector<std::span<const uint8_t>> texts;
  for (size_t at = kSignature; bytes.size() - at >= kAround;) {
    const size_t length = png_get_uint_32(&bytes[at]);
    if (length > bytes.size() - at - kAround) break;
    const std::string_view type(reinterpret_cast<const char*>(&bytes[at + 4]), 4);
    if (type == "IEND") break;
    if (type == "IDAT" && pixels == 0) pixels = at;
    if (pixels != 0 && (type == "tEXt" || type == "zTXt" || type == "iTXt"))
      texts.push_back(bytes.subspan(at, length + kAround));
    at += length + kAround;
  }
  std::vector<uint8_t> out;
  if (texts.empty()) return out;
  out.assign(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(pixels));
  for (const auto& text : texts) out.insert(out.end(), text.begin(), text.end());
  out.insert(out.end(), bytes.begin() + static_cast<std::ptrdiff_t>(pixels), bytes.end());
  return out;
}

}  // namespace

PngTexts png_texts(std::span<const uint8_t> bytes, const std::string& name) {
  check(bytes.size() >= 8 && png_sig_cmp(bytes.data(), 0, 8) == 0, Code::io, "'{}' is not a PNG file", name);
  const std::vector<uint8_t> sorted = with_texts_first(bytes);
  PngReader reader(sorted.empty() ? bytes : sorted);
  check(reader.read_header(), Code::io, "{}: PNG: {}", name, reader.source.error);
  png_textp texts = nullptr;
  PngTexts out;
  const int n = png_get_text(reader.png, reader.info, &texts, nullptr);
  for (int i = 0; i < n; ++i) {
    const bool utf8 =
        texts[i].compression == PNG_ITXT_COMPRESSION_NONE || texts[i].compression == PNG_ITXT_COMPRESSION_zTXt;
    const std::string_view text(texts[i].text, utf8 ? texts[i].itxt_length : texts[i].text_length);
    // Some programs write UTF-8 where the format expects Latin-1.
    out[from_latin1(texts[i].key)] = utf8 || valid_utf8(text) == text ? std::string(text) : from_latin1(text);
  }
  return out;
}

DecodedImage decode_png(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options) {
  PngReader reader(bytes);
  check(reader.read_header(), Code::io, "{}: PNG: {}", name, reader.source.error);
  const int64_t h = png_get_image_height(reader.png, reader.info), w = png_get_image_width(reader.png, reader.info);
  check_image_size(h, w, name);
  if (options.only_size) return {.size = {h, w}};
  HostArray rgba(Shape{DType::u8, {h, w, 4}});
  check(reader.read_pixels(rgba.mutable_view<uint8_t>().data(), static_cast<size_t>(h), static_cast<size_t>(w) * 4),
        Code::io, "{}: PNG: {}", name, reader.source.error);
  return from_rgba(rgba, options.alpha);
}

}  // namespace md
