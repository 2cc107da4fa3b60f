// A small plotter: a canvas that blends coverage, axes with round numbers, anti-aliased lines.
#include "maxdiffusion/metrics/curve.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/text_raster.h"

namespace md {
namespace {

using Color = std::array<uint8_t, 3>;

constexpr int64_t kWidth = 960, kHeight = 540;                       // pixels
constexpr int64_t kLeft = 86, kRight = 28, kTop = 52, kBottom = 62;  // margins of the plot
constexpr int64_t kTitleSize = 18, kLabelSize = 14, kTickSize = 13;  // pixels per em
constexpr double kLineWidth = 2.2, kFaintWidth = 1.0, kFaintAlpha = 0.4;
constexpr Color kText = {40, 40, 40}, kAxis = {120, 120, 120}, kGrid = {229, 229, 229};
constexpr std::array<Color, 6> kPalette = {
    {{31, 103, 180}, {230, 110, 20}, {40, 150, 60}, {200, 40, 50}, {130, 90, 180}, {110, 80, 70}}};

class Canvas {
 public:
  Canvas() : rgb_(Shape{DType::u8, {kHeight, kWidth, 3}}) { std::ranges::fill(rgb_.mutable_view<uint8_t>(), 255); }
  HostArray& rgb() { return rgb_; }

  void blend(int64_t x, int64_t y, const Color& c, double alpha) {
    if (x < 0 || x >= kWidth || y < 0 || y >= kHeight) return;
    uint8_t* p = reinterpret_cast<uint8_t*>(rgb_.mutable_data()) + (y * kWidth + x) * 3;
    for (size_t i = 0; i < 3; ++i) p[i] = static_cast<uint8_t>(std::lround(p[i] + (c[i] - p[i]) * alpha));
  }
  void box(int64_t x0, int64_t y0, int64_t x1, int64_t y1, const Color& c, double alpha = 1) {
    for (int64_t y = y0; y <= y1; ++y)
      for (int64_t x = x0; x <= x1; ++x) blend(x, y, c, alpha);
  }
  /// `align`: 0 from x to the right, 0.5 around x, 1 ending at x. y: top.
  void text(double x, int64_t y, const std::string& s, int64_t size, double align) {
    const int64_t left = std::llround(x - align * static_cast<double>(text_width(s, size)));
    raster_text(s, size, [&](int64_t dx, int64_t dy, uint8_t ink) { blend(left + dx, y + dy, kText, ink / 255.0); });
  }
  /// Text that is read upwards, centred on y; x: left edge.
  void upward_text(int64_t x, int64_t y, const std::string& s, int64_t size) {
    const int64_t start = y + text_width(s, size) / 2;
    raster_text(s, size, [&](int64_t dx, int64_t dy, uint8_t ink) { blend(x + dy, start - dx, kText, ink / 255.0); });
  }

 private:
  HostArray rgb_;
};

/// Coverage of each pixel of the plot by a line. Segments of one line are combined by maximum, so that joints are not
/// darker.
class LineCoverage {
 public:
  explicit LineCoverage(double width) : half_(width / 2), cover_(static_cast<size_t>(kWidth * kHeight)) {}

  void segment(double x0, double y0, double x1, double y1) {
    auto clip = [](double v, int64_t low, int64_t high) {
      return static_cast<int64_t>(std::clamp(v, static_cast<double>(low), static_cast<double>(high)));
    };
    const double reach = half_ + 1;
    const int64_t left = clip(std::floor(std::min(x0, x1) - reach), kLeft, kWidth - kRight),
                  right = clip(std::ceil(std::max(x0, x1) + reach), kLeft, kWidth - kRight),
                  top = clip(std::floor(std::min(y0, y1) - reach), kTop, kHeight - kBottom),
                  bottom = clip(std::ceil(std::max(y0, y1) + reach), kTop, kHeight - kBottom);
    const double dx = x1 - x0, dy = y1 - y0, length2 = dx * dx + dy * dy;
    for (int64_t y = top; y <= bottom; ++y) {
      for (int64_t x = left; x <= right; ++x) {
        const double px = static_cast<double>(x) - x0, py = static_cast<double>(y) - y0;
        const double t = length2 > 0 ? std::clamp((px * dx + py * dy) / length2, 0.0, 1.0) : 0;
        const double distance = std::hypot(px - t * dx, py - t * dy);
        float& c = cover_[static_cast<size_t>(y * kWidth + x)];
        c = std::max(c, static_cast<float>(std::clamp(half_ + 0.5 - distance, 0.0, 1.0)));
      }
    }
  }
  /// Amount of ink inside a box.
  double inside(int64_t x0, int64_t y0, int64_t x1, int64_t y1) const {
    double sum = 0;
    for (int64_t y = y0; y <= y1; ++y)
      for (int64_t x = x0; x <= x1; ++x) sum += cover_[static_cast<size_t>(y * kWidth + x)];
    return sum;
  }
  void paint(Canvas& canvas, const Color& color, double alpha) const {
    for (int64_t y = kTop; y <= kHeight - kBottom; ++y)
      for (int64_t x = kLeft; x <= kWidth - kRight; ++x)
        if (float c = cover_[static_cast<size_t>(y * kWidth + x)]; c > 0) canvas.blend(x, y, color, alpha * c);
  }

 private:
  double half_;
  std::vector<float> cover_;
};

bool drawable(double y, bool log_y) { return std::isfinite(y) && (!log_y || y > 0); }

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void include(double v) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
};

/// Range of values in plot units (log10 with log_y). The outermost hundredth of faint curves may be clipped, so that
/// outliers do not flatten the plot.
Range y_range(const std::vector<Curve>& curves, bool log_y) {
  Range r;
  for (const Curve& c : curves) {
    std::vector<double> v;
    for (double y : c.y)
      if (drawable(y, log_y)) v.push_back(log_y ? std::log10(y) : y);
    if (v.empty()) continue;
    std::sort(v.begin(), v.end());
    const size_t cut = c.faint ? v.size() / 100 : 0;
    r.include(v[cut]);
    r.include(v[v.size() - 1 - cut]);
  }
  if (r.low > r.high) r = {.low = 0, .high = 1};
  if (!log_y && r.low >= 0 && r.low < 0.35 * r.high) r.low = 0;
  if (r.high - r.low < 1e-12 * std::max(std::abs(r.high), 1e-30)) {
    const double d = r.high == 0 ? 1 : std::abs(r.high) * 0.1;
    r.low -= d, r.high += d;
  }
  const double pad = 0.05 * (r.high - r.low);
  return {.low = r.low == 0 && !log_y ? 0 : r.low - pad, .high = r.high + pad};
}

/// Tick label; all labels of an axis share unit and digits.
std::string tick_text(double v, double spacing, double largest) {
  if (v == 0) return "0";
  if (largest < 1e-3) return fmt::format("{:.3g}", v);
  const auto [scale, unit] = largest >= 1e6   ? std::pair(1e6, "M")
                             : largest >= 1e4 ? std::pair(1e3, "k")
                                              : std::pair(1., "");
  const int digits = std::max(0, static_cast<int>(std::ceil(-std::log10(spacing / scale) - 1e-9)));
  return fmt::format("{:.{}f}{}", v / scale, digits, unit);
}

/// Ticks of a logarithmic axis as exponents: 1, 2 and 5 of each decade for few decades, else whole exponents; linear
/// ticks if these are fewer than three.
std::vector<double> log_ticks(double low, double high) {
  std::vector<double> out;
  if (high - low > 3) return axis_ticks(low, high, 7);
  for (int e = static_cast<int>(std::floor(low)); e <= static_cast<int>(std::ceil(high)); ++e)
    for (double m : {1.0, 2.0, 5.0})
      if (double v = e + std::log10(m); v >= low && v <= high) out.push_back(v);
  if (out.size() >= 3) return out;
  out.clear();
  for (double v : axis_ticks(std::pow(10, low), std::pow(10, high), 6))
    if (v > 0) out.push_back(std::log10(v));
  return out;
}

}  // namespace

std::vector<double> smoothed(const std::vector<double>& values, double horizon) {
  const double decay = std::exp(-1 / std::max(horizon, 1e-9));
  std::vector<double> sum(values.size()), weight(values.size());
  // A forward and a backward pass: the two lags cancel. A value's own weight is counted in both passes.
  auto pass = [&](auto&& index_of) {
    double s = 0, w = 0;
    for (size_t k = 0; k < values.size(); ++k) {
      const size_t i = index_of(k);
      s *= decay, w *= decay;
      if (std::isfinite(values[i])) s += values[i], w += 1;
      sum[i] += s, weight[i] += w;
    }
  };
  pass([](size_t k) { return k; });
  pass([n = values.size()](size_t k) { return n - 1 - k; });
  for (size_t i = 0; i < values.size(); ++i) sum[i] = weight[i] > 0 ? sum[i] / weight[i] : values[i];
  return sum;
}

std::vector<double> axis_ticks(double low, double high, int most) {
  if (!(high > low) || most < 1) return {};
  const double rough = (high - low) / most, unit = std::pow(10, std::floor(std::log10(rough)));
  double spacing = unit * 10;
  for (double m : {1.0, 2.0, 5.0})
    if (unit * m >= rough) {
      spacing = unit * m;
      break;
    }
  std::vector<double> out;
  for (double k = std::ceil(low / spacing - 1e-9); k * spacing <= high + 1e-9 * spacing; ++k)
    out.push_back(k * spacing);
  return out;
}

void write_curve_png(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::string& y_label, const std::vector<Curve>& curves, bool log_y) {
  Canvas canvas;
  Range xr;
  for (const Curve& c : curves)
    for (double x : c.x)
      if (std::isfinite(x)) xr.include(x);
  if (xr.low > xr.high) xr = {.low = 0, .high = 1};
  if (xr.low == xr.high) xr.high = xr.low + 1;
  const Range yr = y_range(curves, log_y);
  const double plot_w = kWidth - kLeft - kRight, plot_h = kHeight - kTop - kBottom;
  auto px = [&](double x) { return kLeft + (x - xr.low) / (xr.high - xr.low) * plot_w; };
  auto py = [&](double y) { return kTop + (yr.high - y) / (yr.high - yr.low) * plot_h; };  // y in plot units

  auto spacing_of = [](const std::vector<double>& t) { return t.size() > 1 ? t[1] - t[0] : 1.0; };
  const auto y_ticks = log_y ? log_ticks(yr.low, yr.high) : axis_ticks(yr.low, yr.high, 7);
  for (double t : y_ticks) {
    const int64_t y = std::llround(py(t));
    canvas.box(kLeft, y, kWidth - kRight, y, kGrid);
    const std::string text = log_y ? fmt::format("{:.3g}", std::pow(10, t))
                                   : tick_text(t, spacing_of(y_ticks), std::max(std::abs(yr.low), std::abs(yr.high)));
    canvas.text(kLeft - 9, y - line_height(kTickSize) / 2, text, kTickSize, 1);
  }
  const auto x_ticks = axis_ticks(xr.low, xr.high, 9);
  for (double t : x_ticks) {
    const int64_t x = std::llround(px(t));
    canvas.box(x, kTop, x, kHeight - kBottom, kGrid);
    canvas.box(x, kHeight - kBottom, x, kHeight - kBottom + 4, kAxis);
    canvas.text(static_cast<double>(x), kHeight - kBottom + 8, tick_text(t, spacing_of(x_ticks), std::abs(xr.high)),
                kTickSize, 0.5);
  }

  size_t color = 0;
  std::vector<LineCoverage> lines;
  for (const Curve& c : curves) {
    LineCoverage& line = lines.emplace_back(c.faint ? kFaintWidth : kLineWidth);
    const size_t n = std::min(c.x.size(), c.y.size());
    std::pair<double, double> last;
    bool joined = false;
    for (size_t i = 0; i < n; ++i) {
      if (!std::isfinite(c.x[i]) || !drawable(c.y[i], log_y)) {
        joined = false;
        continue;
      }
      const std::pair at(px(c.x[i]), py(log_y ? std::log10(c.y[i]) : c.y[i]));
      if (!std::exchange(joined, true)) last = at;
      line.segment(last.first, last.second, at.first, at.second);
      last = at;
    }
    line.paint(canvas, kPalette[color % kPalette.size()], c.faint ? kFaintAlpha : 1);
    if (!c.faint) ++color;
  }

  canvas.box(kLeft, kTop, kLeft, kHeight - kBottom, kAxis);
  canvas.box(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, kAxis);
  canvas.text(kLeft, 16, title, kTitleSize, 0);
  canvas.text(kLeft + plot_w / 2, kHeight - 30, x_label, kLabelSize, 0.5);
  canvas.upward_text(12, kTop + static_cast<int64_t>(plot_h) / 2, y_label, kLabelSize);

  // The legend is in the corner with the fewest points.
  std::vector<std::pair<std::string, Color>> named;
  color = 0;
  for (const Curve& c : curves) {
    if (!c.faint && !c.name.empty()) named.emplace_back(c.name, kPalette[color % kPalette.size()]);
    if (!c.faint) ++color;
  }
  if (named.size() > 1) {
    int64_t widest = 0;
    for (const auto& [name, c] : named) widest = std::max(widest, text_width(name, kTickSize));
    const int64_t row = line_height(kTickSize) + 4, w = widest + 52, h = row * static_cast<int64_t>(named.size()) + 8;
    constexpr int64_t kFar = 10;  // pixels from the edges
    int64_t x = 0, y = 0;
    double least = std::numeric_limits<double>::infinity();
    for (int64_t cy : {kTop + kFar, kHeight - kBottom - kFar - h})
      for (int64_t cx : {kWidth - kRight - kFar - w, kLeft + kFar}) {
        double ink = 0;
        for (const LineCoverage& l : lines) ink += l.inside(cx, cy, cx + w, cy + h);
        if (ink < least) least = ink, x = cx, y = cy;
      }
    canvas.box(x, y, x + w, y + h, {255, 255, 255}, 0.85);
    x += 8, y += 6;
    for (size_t i = 0; i < named.size(); ++i) {
      const int64_t top = y + row * static_cast<int64_t>(i), middle = top + line_height(kTickSize) / 2;
      canvas.box(x, middle - 1, x + 24, middle + 1, named[i].second);
      canvas.text(static_cast<double>(x + 32), top, named[i].first, kTickSize, 0);
    }
  }
  write_png(path, canvas.rgb());
}

}  // namespace md
