#include "maxdiffusion/media/canny.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace md {

HostArray canny_edges(const HostArray& rgb, int low, int high) {
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1];
  const auto pixels = rgb.view<uint8_t>();
  // Pixels beyond an edge repeat the edge.
  auto at = [&](int64_t y, int64_t x, int64_t c) {
    return static_cast<int>(
        pixels[static_cast<size_t>((std::clamp<int64_t>(y, 0, h - 1) * w + std::clamp<int64_t>(x, 0, w - 1)) * 3 + c)]);
  };
  struct Gradient {
    int x = 0, y = 0, size = 0;
  };
  std::vector<Gradient> gradients(static_cast<size_t>(h * w));
  for (int64_t y = 0; y < h; ++y)
    for (int64_t x = 0; x < w; ++x) {
      Gradient& best = gradients[static_cast<size_t>(y * w + x)];
      best.size = -1;
      for (int64_t c = 0; c < 3; ++c) {
        auto column = [&](int64_t k) { return at(y - 1, x + k, c) + 2 * at(y, x + k, c) + at(y + 1, x + k, c); };
        auto row = [&](int64_t k) { return at(y + k, x - 1, c) + 2 * at(y + k, x, c) + at(y + k, x + 1, c); };
        const int gx = column(1) - column(-1), gy = row(1) - row(-1), size = std::abs(gx) + std::abs(gy);
        if (size > best.size) best = {gx, gy, size};
      }
    }
  auto size = [&](int64_t y, int64_t x) {
    return y < 0 || x < 0 || y >= h || x >= w ? 0 : gradients[static_cast<size_t>(y * w + x)].size;
  };

  // Non-maximum suppression: a pixel stays if no neighbour across the edge is steeper; directions are divided at 22.5°
  // in 15-bit fixed point.
  enum : uint8_t { kNone, kWeak, kEdge };
  std::vector<uint8_t> kind(static_cast<size_t>(h * w), kNone);
  std::vector<int64_t> open;
  constexpr int64_t kShift = 15, kTan22 = 13573;  // tan 22.5° · 2^15, rounded
  for (int64_t y = 0; y < h; ++y)
    for (int64_t x = 0; x < w; ++x) {
      const Gradient& g = gradients[static_cast<size_t>(y * w + x)];
      if (g.size <= low) continue;
      const int64_t ax = std::abs(g.x), ay = static_cast<int64_t>(std::abs(g.y)) << kShift, tan22 = ax * kTan22;
      bool peak = false;
      if (ay < tan22) {
        peak = g.size > size(y, x - 1) && g.size >= size(y, x + 1);
      } else if (ay > tan22 + (ax << (kShift + 1))) {
        peak = g.size > size(y - 1, x) && g.size >= size(y + 1, x);
      } else {
        const int64_t s = (g.x ^ g.y) < 0 ? -1 : 1;
        peak = g.size > size(y - 1, x - s) && g.size > size(y + 1, x + s);
      }
      if (!peak) continue;
      const int64_t i = y * w + x;
      kind[static_cast<size_t>(i)] = g.size > high ? kEdge : kWeak;
      if (g.size > high) open.push_back(i);
    }
  while (!open.empty()) {
    const int64_t i = open.back(), y = i / w, x = i % w;
    open.pop_back();
    for (int64_t ny = std::max<int64_t>(y - 1, 0); ny <= std::min(y + 1, h - 1); ++ny)
      for (int64_t nx = std::max<int64_t>(x - 1, 0); nx <= std::min(x + 1, w - 1); ++nx)
        if (uint8_t& k = kind[static_cast<size_t>(ny * w + nx)]; k == kWeak) {
          k = kEdge;
          open.push_back(ny * w + nx);
        }
  }

  HostArray out(rgb.shape());
  auto to = out.mutable_view<uint8_t>();
  for (size_t i = 0; i < kind.size(); ++i)
    std::fill_n(to.begin() + static_cast<int64_t>(3 * i), 3, kind[i] == kEdge ? 255 : 0);
  return out;
}

}  // namespace md
