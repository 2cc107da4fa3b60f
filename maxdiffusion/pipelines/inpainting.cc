#include "maxdiffusion/pipelines/inpainting.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

int64_t rows_of(const HostArray& image) { return image.dims()[0]; }
int64_t columns_of(const HostArray& image) { return image.dims()[1]; }

/// ITU-R 601 luma in fixed point, as Pillow's mode L: [H·W].
std::vector<uint8_t> grey(const HostArray& rgb) {
  const auto v = rgb.view<uint8_t>();
  std::vector<uint8_t> out(v.size() / 3);
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<uint8_t>((v[3 * i] * 19595u + v[3 * i + 1] * 38470u + v[3 * i + 2] * 7471u + 0x8000u) >> 16);
  return out;
}

/// Replaces every value by f of the values in its row, then in its column, up to `reach` away. f: values by offset (its
/// own is the middle one); beyond the sides the last value repeats.
template <class F>
void over_both_axes(std::vector<float>& v, int64_t height, int64_t width, int64_t reach, const F& f) {
  std::vector<float> window(static_cast<size_t>(2 * reach + 1));
  for (const bool rows : {true, false}) {
    const std::vector<float> from = v;
    const int64_t length = rows ? width : height, step = rows ? 1 : width, lines = rows ? height : width;
    for (int64_t line = 0; line < lines; ++line) {
      const int64_t start = line * (rows ? width : 1);
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t k = -reach; k <= reach; ++k)
          window[static_cast<size_t>(k + reach)] =
              from[static_cast<size_t>(start + std::clamp<int64_t>(i + k, 0, length - 1) * step)];
        v[static_cast<size_t>(start + i * step)] = f(window);
      }
    }
  }
}

/// The window of width × height at column x and row y of `image`; outside of the image its border pixels repeat.
HostArray window(const HostArray& image, int64_t x, int64_t y, int64_t width, int64_t height) {
  HostArray out(Shape{DType::u8, {height, width, 3}});
  const auto from = image.view<uint8_t>();
  auto to = out.mutable_view<uint8_t>().begin();
  for (int64_t i = 0; i < height; ++i)
    for (int64_t k = 0; k < width; ++k) {
      const int64_t row = std::clamp<int64_t>(y + i, 0, rows_of(image) - 1),
                    column = std::clamp<int64_t>(x + k, 0, columns_of(image) - 1);
      to = std::copy_n(from.begin() + (row * columns_of(image) + column) * 3, 3, to);
    }
  return out;
}

}  // namespace

HostArray mask_of(const HostArray& rgb, int64_t height, int64_t width, int64_t grow, double blur) {
  const std::vector<uint8_t> levels = grey(resize_rgb8(rgb, height, width, Filter::lanczos));
  std::vector<float> v(levels.size());
  std::ranges::transform(levels, v.begin(), [](uint8_t x) { return x / 255.0f >= 0.5f ? 1.0f : 0.0f; });
  const int64_t whole = std::max(height, width);  // no pixel is farther away
  if (grow > 0)
    over_both_axes(v, height, width, std::min(grow, whole),
                   [](const std::vector<float>& near) { return std::ranges::max(near); });
  if (blur > 0) {
    const auto reach = static_cast<int64_t>(std::min(std::ceil(3 * blur), static_cast<double>(whole)));
    std::vector<float> weights;
    double sum = 0;
    for (int64_t k = -reach; k <= reach; ++k) {
      const double x = static_cast<double>(k) / blur;
      weights.push_back(static_cast<float>(std::exp(-x * x / 2)));
      sum += weights.back();
    }
    over_both_axes(v, height, width, reach, [&](const std::vector<float>& near) {
      double total = 0;
      for (size_t i = 0; i < near.size(); ++i) total += near[i] * weights[i];
      return static_cast<float>(total / sum);
    });
  }
  return HostArray::of<float>({DType::f32, {height, width}}, v);
}

HostArray mask_cells(const HostArray& mask, int64_t downscale, bool middle) {
  const int64_t h = mask.dims()[0] / downscale, w = mask.dims()[1] / downscale;
  const auto v = mask.view<float>();
  const bool hard = std::ranges::all_of(v, [](float x) { return x == 0 || x == 1; });
  HostArray out(Shape{DType::f32, {1, h, w, 1}});
  auto to = out.mutable_view<float>();
  const int64_t side = !hard    ? downscale
                       : middle ? std::min<int64_t>(downscale, 2)
                                : 1,
                start = hard && middle ? (downscale - side) / 2 : 0;
  for (int64_t y = 0; y < h; ++y)
    for (int64_t x = 0; x < w; ++x) {
      double sum = 0;
      for (int64_t i = 0; i < side; ++i)
        for (int64_t k = 0; k < side; ++k)
          sum += v[static_cast<size_t>((y * downscale + start + i) * mask.dims()[1] + x * downscale + start + k)];
      to[static_cast<size_t>(y * w + x)] = static_cast<float>(sum / static_cast<double>(side * side));
    }
  return out;
}

HostArray mask_pixels(const HostArray& mask, int64_t downscale) {
  const int64_t h = mask.dims()[0] / downscale, w = mask.dims()[1] / downscale;
  HostArray out(Shape{DType::f32, {1, h, w, downscale * downscale}});
  const auto from = mask.view<float>();
  auto to = out.mutable_view<float>().begin();
  for (int64_t y = 0; y < h; ++y)
    for (int64_t x = 0; x < w; ++x)
      for (int64_t k = 0; k < downscale * downscale; ++k)
        *to++ =
            from[static_cast<size_t>((y * downscale + k / downscale) * mask.dims()[1] + x * downscale + k % downscale)];
  return out;
}

HostArray without_masked(const HostArray& images, const HostArray& mask) {
  HostArray out(Shape{DType::f32, images.dims()});
  const auto from = images.view<uint8_t>();
  const auto hidden = mask.view<float>();
  auto to = out.mutable_view<float>();
  for (size_t i = 0; i < to.size(); ++i)
    to[i] = hidden[i / 3 % hidden.size()] < 0.5f ? static_cast<float>(from[i]) / 127.5f - 1 : 0.0f;
  return out;
}

HostArray extended(const HostArray& image, const Margins& m) {
  return window(image, -m.left, -m.top, columns_of(image) + m.left + m.right, rows_of(image) + m.top + m.bottom);
}

HostArray extended_mask(const HostArray& mask, const HostArray& image, const Margins& m) {
  const int64_t height = rows_of(image), width = columns_of(image), wide = width + m.left + m.right;
  HostArray out(Shape{DType::u8, {height + m.top + m.bottom, wide, 3}});
  auto to = out.mutable_view<uint8_t>();
  std::ranges::fill(to, uint8_t{255});
  const HostArray inner = mask ? resize_rgb8(mask, height, width, Filter::lanczos) : HostArray();
  for (int64_t y = 0; y < height; ++y) {
    const auto row = to.begin() + ((y + m.top) * wide + m.left) * 3;
    if (inner)
      std::copy_n(inner.view<uint8_t>().begin() + y * width * 3, width * 3, row);
    else
      std::fill_n(row, width * 3, uint8_t{0});
  }
  return out;
}

Region region_around(const HostArray& mask, int64_t pad, int64_t height, int64_t width) {
  const int64_t h = rows_of(mask), w = columns_of(mask);
  const std::vector<uint8_t> levels = grey(mask);
  int64_t x1 = w, y1 = h, x2 = 0, y2 = 0;
  for (int64_t y = 0; y < h; ++y)
    for (int64_t x = 0; x < w; ++x)
      if (levels[static_cast<size_t>(y * w + x)] != 0)
        x1 = std::min(x1, x), y1 = std::min(y1, y), x2 = std::max(x2, x + 1), y2 = std::max(y2, y + 1);
  check(x1 < x2, Code::invalid_config, "mask_image is black; expected white where the image is replaced");
  x1 = std::max<int64_t>(x1 - pad, 0), y1 = std::max<int64_t>(y1 - pad, 0);
  x2 = std::min(x2 + pad, w), y2 = std::min(y2 + pad, h);
  /// Extends [a, b) by `extra`, within [0, most) if possible.
  const auto grown = [](int64_t& a, int64_t& b, int64_t extra, int64_t most) {
    extra = std::max<int64_t>(extra, 0);
    a -= extra / 2, b += extra - extra / 2;
    if (b >= most) a -= b - most, b = most;
    if (a < 0) b -= a, a = 0;
    b = std::min(b, most);
  };
  const double proportion = static_cast<double>(x2 - x1) / static_cast<double>(y2 - y1),
               wanted = static_cast<double>(width) / static_cast<double>(height);
  if (proportion > wanted)
    grown(y1, y2, static_cast<int64_t>(static_cast<double>(x2 - x1) / wanted - static_cast<double>(y2 - y1)), h);
  else
    grown(x1, x2, static_cast<int64_t>(static_cast<double>(y2 - y1) * wanted - static_cast<double>(x2 - x1)), w);
  return {x1, y1, x2 - x1, y2 - y1};
}

HostArray fitted(const HostArray& image, const Region& r, int64_t height, int64_t width) {
  const HostArray part = crop_rgb8(image, r.y, r.x, r.height, r.width);
  const bool wider = width * r.height < r.width * height;  // than the result
  const int64_t w = wider ? width : std::max<int64_t>(r.width * height / r.height, 1),
                h = wider ? std::max<int64_t>(r.height * width / r.width, 1) : height;
  return window(resize_rgb8(part, h, w, Filter::lanczos), w / 2 - width / 2, h / 2 - height / 2, width, height);
}

HostArray put_back(const HostArray& image, const HostArray& mask, const Region& r, const HostArray& made) {
  // Scales to cover the region, then crops the centre.
  const bool wider = columns_of(made) * r.height > r.width * rows_of(made);
  const int64_t w = wider ? columns_of(made) * r.height / rows_of(made) : r.width,
                h = wider ? r.height : rows_of(made) * r.width / columns_of(made);
  const HostArray sized =
      resize_rgb8(made, h, w, {w / 2 - r.width / 2, h / 2 - r.height / 2, r.width, r.height}, Filter::lanczos);
  const std::vector<uint8_t> opaque = grey(mask);
  HostArray out(Shape{DType::u8, image.dims()});
  const auto old = image.view<uint8_t>(), now = sized.view<uint8_t>();
  auto to = out.mutable_view<uint8_t>();
  std::ranges::copy(old, to.begin());
  for (int64_t y = 0; y < r.height; ++y)
    for (int64_t x = 0; x < r.width; ++x) {
      const auto at = static_cast<size_t>((y + r.y) * columns_of(image) + x + r.x);
      const unsigned part = opaque[at];
      for (size_t c = 0; c < 3; ++c) {
        const unsigned sum = part * now[static_cast<size_t>(y * r.width + x) * 3 + c] + (255 - part) * old[at * 3 + c];
        to[at * 3 + c] = static_cast<uint8_t>((sum + 127) / 255);
      }
    }
  return out;
}

}  // namespace md
