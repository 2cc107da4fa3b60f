#include "maxdiffusion/media/resize.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

// Source of the constants: Pillow's libImaging/Resample.c. Weights have 22 fractional bits, which leaves 8 bits of
// value and 2 of headroom in 32.
constexpr int kPrecision = 32 - 8 - 2;

struct Taps {
  int64_t first = 0;  // first source pixel
  std::vector<int32_t> weights;
};

double sinc(double x) { return x == 0 ? 1 : std::sin(x * std::numbers::pi) / (x * std::numbers::pi); }

/// Radius of the filter in pixels.
double support_of(Filter filter) { return filter == Filter::bilinear ? 1 : filter == Filter::bicubic ? 2 : 3; }

/// Filter response, zero beyond the support. Bicubic: Keys 1981, a = −1/2.
double response(Filter filter, double x) {
  if (filter == Filter::bilinear) return std::max(0.0, 1.0 - std::abs(x));
  if (filter == Filter::lanczos) return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0;
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

/// Of `count` pixels from `begin` on, of an axis that is resized from `in` to `out` pixels.
std::vector<Taps> taps_of(int64_t in, int64_t out, int64_t begin, int64_t count, Filter filter) {
  const double scale = static_cast<double>(in) / static_cast<double>(out), widen = std::max(scale, 1.0);
  const double support = widen * support_of(filter);
  std::vector<Taps> all(static_cast<size_t>(count));
  std::vector<double> w;
  for (int64_t i = begin; i < begin + count; ++i) {
    const double centre = (static_cast<double>(i) + 0.5) * scale;
    const int64_t first = std::max<int64_t>(static_cast<int64_t>(std::floor(centre - support + 0.5)), 0);
    const int64_t last = std::min<int64_t>(static_cast<int64_t>(std::floor(centre + support + 0.5)), in);
    w.clear();
    double sum = 0;
    for (int64_t x = first; x < last; ++x) {
      w.push_back(response(filter, (static_cast<double>(x) - centre + 0.5) / widen));
      sum += w.back();
    }
    Taps& t = all[static_cast<size_t>(i - begin)];
    t.first = first;
    for (double v : w)
      t.weights.push_back(static_cast<int32_t>(v / sum * (1 << kPrecision) + (v / sum < 0 ? -0.5 : 0.5)));
  }
  return all;
}

uint8_t narrow(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kPrecision, 0, 255)); }

/// Columns `part.x` to `part.x + part.width` of the image that is resized to `width`.
HostArray resize_width(const HostArray& rgb, int64_t width, const Region& part, Filter filter) {
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1];
  const std::vector<Taps> taps = taps_of(w, width, part.x, part.width, filter);
  HostArray out(Shape{DType::u8, {h, part.width, 3}});
  const uint8_t* row = rgb.view<uint8_t>().data();
  uint8_t* to = out.mutable_view<uint8_t>().data();
  for (int64_t y = 0; y < h; ++y, row += w * 3) {
    for (const Taps& t : taps) {
      int32_t r = 1 << (kPrecision - 1), g = r, b = r;
      const uint8_t* p = row + t.first * 3;
      for (int32_t k : t.weights) {
        r += p[0] * k;
        g += p[1] * k;
        b += p[2] * k;
        p += 3;
      }
      *to++ = narrow(r);
      *to++ = narrow(g);
      *to++ = narrow(b);
    }
  }
  return out;
}

/// Rows `part.y` to `part.y + part.height` of the image that is resized to `height`.
HostArray resize_height(const HostArray& rgb, int64_t height, const Region& part, Filter filter) {
  const int64_t row = rgb.dims()[1] * 3;
  HostArray out(Shape{DType::u8, {part.height, rgb.dims()[1], 3}});
  const uint8_t* from = rgb.view<uint8_t>().data();
  uint8_t* to = out.mutable_view<uint8_t>().data();
  std::vector<int32_t> sums(static_cast<size_t>(row));
  for (const Taps& t : taps_of(rgb.dims()[0], height, part.y, part.height, filter)) {
    std::fill(sums.begin(), sums.end(), 1 << (kPrecision - 1));
    const uint8_t* p = from + t.first * row;
    for (int32_t k : t.weights) {
      for (int64_t x = 0; x < row; ++x) sums[static_cast<size_t>(x)] += p[x] * k;
      p += row;
    }
    for (int32_t s : sums) *to++ = narrow(s);
  }
  return out;
}

}  // namespace

HostArray resize_rgb8(const HostArray& rgb, int64_t height, int64_t width, Filter filter) {
  return resize_rgb8(rgb, height, width, {0, 0, width, height}, filter);
}

HostArray resize_rgb8(const HostArray& rgb, int64_t height, int64_t width, const Region& part, Filter filter) {
  check(rgb.shape().rank() == 3 && rgb.dtype() == DType::u8 && rgb.dims()[2] == 3 && rgb.dims()[0] > 0 &&
            rgb.dims()[1] > 0 && height > 0 && width > 0,
        Code::internal, "resize: {} to {}x{}: expected a u8[H,W,3] image and sizes > 0", to_string(rgb.shape()), height,
        width);
  check(part.y >= 0 && part.x >= 0 && part.height > 0 && part.width > 0 && part.y + part.height <= height &&
            part.x + part.width <= width,
        Code::internal, "resize: {}x{} at ({}, {}) is outside the image of {}x{}", part.height, part.width, part.y,
        part.x, height, width);
  HostArray out = rgb;
  if (width != rgb.dims()[1])
    out = resize_width(out, width, part, filter);
  else if (part.width != width)
    out = crop_rgb8(out, 0, part.x, out.dims()[0], part.width);
  if (height != rgb.dims()[0])
    out = resize_height(out, height, part, filter);
  else if (part.height != height)
    out = crop_rgb8(out, part.y, 0, part.height, part.width);
  return out;
}

HostArray crop_rgb8(const HostArray& rgb, int64_t y, int64_t x, int64_t height, int64_t width) {
  check(y >= 0 && x >= 0 && y + height <= rgb.dims()[0] && x + width <= rgb.dims()[1], Code::internal,
        "crop: {}x{} at ({}, {}) is outside the image {}", height, width, y, x, to_string(rgb.shape()));
  HostArray out(Shape{DType::u8, {height, width, 3}});
  const auto from = rgb.view<uint8_t>();
  auto to = out.mutable_view<uint8_t>().begin();
  for (int64_t i = 0; i < height; ++i) {
    to = std::copy_n(from.begin() + ((y + i) * rgb.dims()[1] + x) * 3, width * 3, to);
  }
  return out;
}

HostArray flip_rgb8(const HostArray& rgb) {
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1];
  HostArray out(rgb.shape());
  const uint8_t* from = rgb.view<uint8_t>().data();
  uint8_t* to = out.mutable_view<uint8_t>().data();
  for (int64_t y = 0; y < h; ++y) {
    for (int64_t x = 0; x < w; ++x) std::copy_n(from + (y * w + w - 1 - x) * 3, 3, to + (y * w + x) * 3);
  }
  return out;
}

}  // namespace md
