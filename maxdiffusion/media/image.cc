#include "maxdiffusion/media/image.h"

#include <png.h>

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/media/text_raster.h"

namespace md {
namespace {

constexpr int64_t kGap = 6;             // white pixels around each cell of a grid
constexpr int64_t kCaptionHeight = 12;  // pixels per em: legible, and ~10 letters fit a 64 pixel image
constexpr int64_t kCaptionLines = 3;

void require_rgb8(const HostArray& a, const char* who) {
  check(a.dtype() == DType::u8 && a.shape().rank() == 3 && a.dims()[2] == 3 && a.dims()[0] > 0 && a.dims()[1] > 0,
        Code::internal, "{}: expected a u8[H,W,3] image, found {}", who, to_string(a.shape()));
}

struct PngSink {
  std::string bytes, error;
};
void on_write(png_structp png, png_bytep data, size_t size) {
  static_cast<PngSink*>(png_get_io_ptr(png))->bytes.append(reinterpret_cast<const char*>(data), size);
}
void on_error(png_structp png, png_const_charp text) {
  static_cast<PngSink*>(png_get_error_ptr(png))->error = text;
  std::longjmp(png_jmpbuf(png), 1);
}
void on_warning(png_structp, png_const_charp) {}

// No local object has a destructor: libpng leaves this function by longjmp.
bool write_rows(png_structp png, png_infop info, const uint8_t* pixels, png_uint_32 h, png_uint_32 w,
                const std::vector<png_text>* texts) {
  if (setjmp(png_jmpbuf(png))) return false;
  png_set_IHDR(png, info, w, h, 8, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT,
               PNG_FILTER_TYPE_DEFAULT);
  if (!texts->empty()) png_set_text(png, info, texts->data(), static_cast<int>(texts->size()));
  png_write_info(png, info);
  for (png_uint_32 y = 0; y < h; ++y) png_write_row(png, pixels + static_cast<size_t>(y) * w * 3);
  png_write_end(png, info);
  return true;
}

// Copies `from`, each pixel as zoom × zoom, with its top left corner at (x, y).
void paste(HostArray& to, const HostArray& from, int64_t x, int64_t y, int64_t zoom) {
  const int64_t h = from.dims()[0] * zoom, w = from.dims()[1] * zoom, stride = to.dims()[1] * 3;
  const auto in = from.view<uint8_t>();
  auto out = to.mutable_view<uint8_t>();
  for (int64_t i = 0; i < h; ++i) {
    for (int64_t j = 0; j < w; ++j) {
      const uint8_t* p = &in[static_cast<size_t>((i / zoom * from.dims()[1] + j / zoom) * 3)];
      std::copy(p, p + 3, &out[static_cast<size_t>((y + i) * stride + (x + j) * 3)]);
    }
  }
}

}  // namespace

std::string encode_png(const HostArray& rgb, const PngTexts& texts) {
  require_rgb8(rgb, "encode_png");
  std::vector<png_text> chunks;  // point into `texts`
  for (const auto& [keyword, text] : texts) {
    png_text chunk{};
    chunk.compression = PNG_ITXT_COMPRESSION_NONE;
    chunk.key = const_cast<char*>(keyword.c_str());
    chunk.text = const_cast<char*>(text.c_str());
    chunk.itxt_length = text.size();
    chunks.push_back(chunk);
  }
  PngSink sink;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, &sink, on_error, on_warning);
  check(png != nullptr, Code::internal, "encode_png: libpng cannot create a writer");
  png_infop info = png_create_info_struct(png);
  png_set_write_fn(png, &sink, on_write, nullptr);
  const bool ok =
      info && write_rows(png, info, reinterpret_cast<const uint8_t*>(rgb.data()),
                         static_cast<png_uint_32>(rgb.dims()[0]), static_cast<png_uint_32>(rgb.dims()[1]), &chunks);
  png_destroy_write_struct(&png, &info);
  check(ok, Code::io, "encode_png: {} of {}", sink.error, to_string(rgb.shape()));
  return std::move(sink.bytes);
}

void write_png(const std::string& path, const HostArray& rgb, const PngTexts& texts) {
  write_file_atomic(path, encode_png(rgb, texts));
}

HostArray to_rgb8(const HostArray& pixels) {
  check(pixels.dtype() == DType::f32, Code::internal, "to_rgb8: expected f32, found {}", to_string(pixels.shape()));
  HostArray out(Shape{DType::u8, pixels.dims()});
  // A NaN becomes 0: std::clamp would return it, and its conversion is undefined.
  std::ranges::transform(pixels.view<float>(), out.mutable_view<uint8_t>().begin(), [](float v) {
    return static_cast<uint8_t>(v > -1.0f ? std::lround(std::min(v, 1.0f) * 127.5f + 127.5f) : 0);
  });
  return out;
}

HostArray image_of_batch(const HostArray& images, int64_t i) { return to_rgb8(without_batch(rows(images, i, 1))); }

void draw_text(HostArray& rgb, int64_t x, int64_t y, const std::string& utf8, int64_t height) {
  require_rgb8(rgb, "draw_text");
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1];
  auto out = rgb.mutable_view<uint8_t>();
  raster_text(utf8, height, [&](int64_t dx, int64_t dy, uint8_t ink) {
    if (x + dx < 0 || x + dx >= w || y + dy < 0 || y + dy >= h) return;
    for (int64_t c = 0; c < 3; ++c) {
      uint8_t& v = out[static_cast<size_t>(((y + dy) * w + x + dx) * 3 + c)];
      v = static_cast<uint8_t>((v * (255 - ink) + 127) / 255);
    }
  });
}

HostArray make_grid(const std::vector<GridCell>& cells, int64_t columns, int64_t zoom) {
  check(!cells.empty() && columns > 0 && zoom > 0, Code::internal,
        "make_grid: {} cells, {} columns, zoom {}: all must be > 0", cells.size(), columns, zoom);
  for (const GridCell& cell : cells) {
    require_rgb8(cell.rgb, "make_grid");
    check(cell.rgb.dims() == cells[0].rgb.dims(), Code::internal, "make_grid: cells differ in size: {} and {}",
          to_string(cells[0].rgb.dims()), to_string(cell.rgb.dims()));
  }
  const int64_t n = static_cast<int64_t>(cells.size()), h = cells[0].rgb.dims()[0] * zoom,
                w = cells[0].rgb.dims()[1] * zoom;
  columns = std::min(columns, n);
  std::vector<std::vector<std::string>> captions(cells.size());
  std::vector<int64_t> tops{kGap};  // of each row of cells, and below the last one
  for (int64_t first = 0; first < n; first += columns) {
    int64_t lines = 0;
    for (int64_t i = first; i < std::min(first + columns, n); ++i) {
      auto& c = captions[static_cast<size_t>(i)];
      if (!cells[static_cast<size_t>(i)].caption.empty() && have_font())
        c = wrap_text(cells[static_cast<size_t>(i)].caption, kCaptionHeight, w, kCaptionLines);
      lines = std::max(lines, static_cast<int64_t>(c.size()));
    }
    tops.push_back(tops.back() + h + (lines ? 2 + lines * line_height(kCaptionHeight) : 0) + kGap);
  }
  HostArray grid(Shape{DType::u8, {tops.back(), kGap + columns * (w + kGap), 3}});
  std::memset(grid.mutable_data(), 255, grid.bytes());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t x = kGap + i % columns * (w + kGap), y = tops[static_cast<size_t>(i / columns)];
    paste(grid, cells[static_cast<size_t>(i)].rgb, x, y, zoom);
    int64_t line = 0;
    for (const std::string& text : captions[static_cast<size_t>(i)])
      draw_text(grid, x, y + h + 2 + line_height(kCaptionHeight) * line++, text, kCaptionHeight);
  }
  return grid;
}

HostArray make_sheet(const std::vector<HostArray>& images, const std::vector<std::string>& columns,
                     const std::vector<std::string>& rows) {
  const auto across = std::ssize(columns), down = std::max<int64_t>(1, std::ssize(rows));
  check(across > 0 && std::ssize(images) == across * down, Code::internal,
        "make_sheet: {} images, {} columns, {} rows: the images must fill them", images.size(), across, down);
  int64_t h = 0, w = 0;
  for (const HostArray& image : images) {
    require_rgb8(image, "make_sheet");
    h = std::max(h, image.dims()[0]), w = std::max(w, image.dims()[1]);
  }
  const int64_t letters = std::clamp<int64_t>(w / 24, kCaptionHeight, 4 * kCaptionHeight), line = line_height(letters);
  using Lines = std::vector<std::string>;
  const auto wrapped = [&](const std::vector<std::string>& labels, int64_t width) {
    std::vector<Lines> all;
    for (const std::string& label : labels)
      all.push_back(have_font() ? wrap_text(label, letters, width, kCaptionLines) : Lines{});
    return all;
  };
  const auto widest = [&](const std::vector<Lines>& labels) {
    int64_t most = 0;
    for (const Lines& of_one : labels)
      for (const std::string& text : of_one) most = std::max(most, text_width(text, letters));
    return most;
  };
  // Row labels may be wider than small images; small images are not widened for column labels.
  const int64_t label_width = std::max(w, 12 * letters);
  const std::vector<Lines> above = wrapped(columns, std::max<int64_t>(w, letters)), left = wrapped(rows, label_width);
  int64_t lines = 0;
  for (const Lines& of_one : above) lines = std::max(lines, std::ssize(of_one));
  const int64_t top = kGap + (lines > 0 ? lines * line + kGap : 0), row_labels = widest(left),
                side = kGap + (row_labels > 0 ? row_labels + kGap : 0);
  HostArray sheet(Shape{DType::u8, {top + down * (h + kGap), side + across * (w + kGap), 3}});
  std::memset(sheet.mutable_data(), 255, sheet.bytes());
  const auto put = [&](const Lines& of_one, int64_t x, int64_t width, int64_t y) {
    for (const std::string& text : of_one) {
      draw_text(sheet, x + (width - text_width(text, letters)) / 2, y, text, letters);
      y += line;
    }
  };
  for (int64_t i = 0; i < across; ++i) {
    const Lines& label = above[static_cast<size_t>(i)];
    put(label, side + i * (w + kGap), w, kGap + (lines - std::ssize(label)) * line);
  }
  for (int64_t i = 0; i < std::ssize(left); ++i) {
    const Lines& label = left[static_cast<size_t>(i)];
    put(label, kGap, row_labels, top + i * (h + kGap) + std::max<int64_t>(0, h - std::ssize(label) * line) / 2);
  }
  for (int64_t i = 0; i < std::ssize(images); ++i) {
    const HostArray& image = images[static_cast<size_t>(i)];
    paste(sheet, image, side + i % across * (w + kGap) + (w - image.dims()[1]) / 2,
          top + i / across * (h + kGap) + (h - image.dims()[0]) / 2, 1);
  }
  return sheet;
}

HostArray film_strip(const HostArray& frames, int64_t count) {
  check(frames.dtype() == DType::u8 && frames.shape().rank() == 4 && frames.dims()[3] == 3 && count > 0, Code::internal,
        "film_strip: expected frames u8[F,H,W,3], found {}", to_string(frames.shape()));
  constexpr int64_t kBetween = 2, kGrey = 200;  // pixels, and their level
  const int64_t n = frames.dims()[0], h = frames.dims()[1], w = frames.dims()[2];
  count = std::min(count, n);
  HostArray strip(Shape{DType::u8, {h, count * (w + kBetween) - kBetween, 3}});
  std::memset(strip.mutable_data(), kGrey, strip.bytes());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t frame = count == 1 ? 0 : (i * (n - 1) + (count - 1) / 2) / (count - 1);
    paste(strip, without_batch(rows(frames, frame, 1)), i * (w + kBetween), 0, 1);
  }
  return strip;
}

}  // namespace md
