// JPEG through libjpeg-turbo: gray, RGB/YCbCr, and print colours (CMYK, YCCK; stored inverted as Adobe writes them).
// The EXIF orientation is applied, as Hugging Face's image loader does. Missing data is an error, not grey stripes.
#include <cstddef>
#include <cstdio>

#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/media/decode.h"
#include "maxdiffusion/media/exif_orientation.h"

namespace md {
namespace {

struct JpegReader {
  jpeg_decompress_struct jpeg{};
  jpeg_error_mgr manager{};
  std::jmp_buf jump;
  char error[JMSG_LENGTH_MAX] = "";

  explicit JpegReader(std::span<const uint8_t> bytes) : bytes_(bytes) {
    jpeg.err = jpeg_std_error(&manager);
    jpeg.client_data = this;
    manager.error_exit = on_error;
    manager.emit_message = on_message;
  }
  ~JpegReader() { jpeg_destroy_decompress(&jpeg); }
  JpegReader(const JpegReader&) = delete;

  bool read_header(int64_t side) {
    if (setjmp(jump)) return false;
    jpeg_create_decompress(&jpeg);
    jpeg_mem_src(&jpeg, bytes_.data(), bytes_.size());
    jpeg_save_markers(&jpeg, JPEG_APP0 + 1, 0xffff);
    jpeg_read_header(&jpeg, TRUE);
    const bool print = jpeg.jpeg_color_space == JCS_CMYK || jpeg.jpeg_color_space == JCS_YCCK;
    jpeg.out_color_space = print ? JCS_CMYK : JCS_RGB;
    // The decoder can omit high frequencies: 1/8, 1/4, 1/2 of the size for a fraction of the work.
    const int64_t shorter = std::min(jpeg.image_width, jpeg.image_height);
    for (jpeg.scale_denom = 8; jpeg.scale_denom > 1 && (side == 0 || shorter / jpeg.scale_denom < 2 * side);)
      jpeg.scale_denom /= 2;
    jpeg_calc_output_dimensions(&jpeg);
    return true;
  }
  bool read_pixels(uint8_t* to, size_t stride) {
    if (setjmp(jump)) return false;
    jpeg_start_decompress(&jpeg);
    while (jpeg.output_scanline < jpeg.output_height) {
      JSAMPROW row = to + jpeg.output_scanline * stride;
      jpeg_read_scanlines(&jpeg, &row, 1);
    }
    jpeg_finish_decompress(&jpeg);
    return true;
  }

 private:
  static void on_error(j_common_ptr info) {
    auto* self = static_cast<JpegReader*>(info->client_data);
    (*info->err->format_message)(info, self->error);
    std::longjmp(self->jump, 1);
  }
  // The only fatal warning is missing data; others (stray bytes between markers) lose no pixels.
  static void on_message(j_common_ptr info, int level) {
    const int code = info->err->msg_code;
    if (level < 0 && (code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER)) on_error(info);
  }
  std::span<const uint8_t> bytes_;
};

// EXIF tag 0x0112 of the first image directory: 1 upright … 8; 1 when absent or malformed.
int orientation(const jpeg_decompress_struct& jpeg) {
  for (jpeg_saved_marker_ptr m = jpeg.marker_list; m; m = m->next) {
    const std::span<const uint8_t> d(m->data, m->data_length);
    if (d.size() < 14 || std::memcmp(d.data(), "Exif\0\0", 6) != 0) continue;
    const auto tiff = d.subspan(6);
    const bool little = tiff[0] == 'I';
    const auto number = [&](size_t at, size_t bytes) -> size_t {
      size_t v = 0;
      if (at + bytes > tiff.size()) return 0;
      for (size_t i = 0; i < bytes; ++i) v |= static_cast<size_t>(tiff[at + i]) << 8 * (little ? i : bytes - 1 - i);
      return v;
    };
    const size_t directory = number(4, 4), entries = number(directory, 2);
    for (size_t e = 0; e < entries; ++e) {
      const size_t at = directory + 2 + 12 * e;
      if (number(at, 2) == 0x0112) {
        const size_t v = number(at + 8, 2);
        return v >= 1 && v <= 8 ? static_cast<int>(v) : 1;
      }
    }
  }
  return 1;
}

// Orientation o: 5–8 swap the axes; then stored rows, columns or both run backwards.
HostArray upright(HostArray rgb, int o) {
  if (o == 1) return rgb;
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1];
  const bool swap = o >= 5;
  const bool rows_back = o == 3 || o == 4 || o == 6 || o == 7, columns_back = o == 2 || o == 3 || o == 7 || o == 8;
  HostArray out(Shape{DType::u8, {swap ? w : h, swap ? h : w, 3}});
  const auto from = rgb.view<uint8_t>();
  auto to = out.mutable_view<uint8_t>().begin();
  for (int64_t y = 0; y < out.dims()[0]; ++y) {
    for (int64_t x = 0; x < out.dims()[1]; ++x) {
      const int64_t row = swap ? x : y, column = swap ? y : x;
      const int64_t at = (rows_back ? h - 1 - row : row) * w + (columns_back ? w - 1 - column : column);
      to = std::copy_n(from.begin() + at * 3, 3, to);
    }
  }
  return out;
}

HostArray print_to_rgb(const HostArray& inverted_cmyk) {
  HostArray rgb(Shape{DType::u8, {inverted_cmyk.dims()[0], inverted_cmyk.dims()[1], 3}});
  const auto from = inverted_cmyk.view<uint8_t>();
  auto to = rgb.mutable_view<uint8_t>();
  for (size_t i = 0; i < from.size() / 4; ++i) {
    for (size_t c = 0; c < 3; ++c)
      to[i * 3 + c] = static_cast<uint8_t>((from[i * 4 + c] * from[i * 4 + 3] + 127) / 255);
  }
  return rgb;
}

}  // namespace

int exif_orientation(std::span<const uint8_t> bytes) {
  if (bytes.size() < 3 || bytes[0] != 0xff || bytes[1] != 0xd8) return 1;
  JpegReader reader(bytes);
  return reader.read_header(0) ? orientation(reader.jpeg) : 1;
}

DecodedImage decode_jpeg(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options) {
  JpegReader reader(bytes);
  check(reader.read_header(options.side), Code::io, "{}: JPEG: {}", name, reader.error);
  const int64_t h = reader.jpeg.output_height, w = reader.jpeg.output_width, channels = reader.jpeg.output_components;
  check_image_size(h, w, name);
  const int turned = orientation(reader.jpeg);  // before the pixels: the end of reading frees the markers
  const int64_t stored_h = reader.jpeg.image_height, stored_w = reader.jpeg.image_width;
  DecodedImage p{.size = turned >= 5 ? ImageSize{stored_w, stored_h} : ImageSize{stored_h, stored_w}};
  if (options.only_size) return p;
  HostArray pixels(Shape{DType::u8, {h, w, channels}});
  check(reader.read_pixels(pixels.mutable_view<uint8_t>().data(), static_cast<size_t>(w * channels)), Code::io,
        "{}: JPEG: {}", name, reader.error);
  if (channels == 4) pixels = print_to_rgb(pixels);
  p.rgb = upright(std::move(pixels), turned);
  return p;
}

}  // namespace md
