// JPEG through libjpeg-turbo: gray, RGB/YCbCr, and print colours (CMYK, YCCK; stored inverted as Adobe writes them).
// Missing data is an error, not grey stripes.
#include <cstddef>
#include <cstdio>

#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/media/decode.h"

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

DecodedImage decode_jpeg(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options) {
  JpegReader reader(bytes);
  check(reader.read_header(options.side), Code::io, "{}: JPEG: {}", name, reader.error);
  const int64_t h = reader.jpeg.output_height, w = reader.jpeg.output_width, channels = reader.jpeg.output_components;
  check_image_size(h, w, name);
  DecodedImage p{.size = {reader.jpeg.image_height, reader.jpeg.image_width}};
  if (options.only_size) return p;
  HostArray pixels(Shape{DType::u8, {h, w, channels}});
  check(reader.read_pixels(pixels.mutable_view<uint8_t>().data(), static_cast<size_t>(w * channels)), Code::io,
        "{}: JPEG: {}", name, reader.error);
  if (channels == 4) pixels = print_to_rgb(pixels);
  p.rgb = std::move(pixels);
  return p;
}

}  // namespace md
