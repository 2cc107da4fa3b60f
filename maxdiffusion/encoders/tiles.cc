#include "maxdiffusion/encoders/tiles.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace md {
namespace {

/// A rectangle of every image, clipped at the image's edges.
HostArray cut(const HostArray& a, int64_t y, int64_t x, int64_t height, int64_t width) {
  const Dims& d = a.dims();
  height = std::min(height, d[1] - y), width = std::min(width, d[2] - x);
  HostArray out(Shape{a.dtype(), {d[0], height, width, d[3]}});
  const int64_t row = width * d[3];
  for (int64_t n = 0; n < d[0]; ++n)
    for (int64_t i = 0; i < height; ++i)
      std::copy_n(a.view<float>().begin() + ((n * d[1] + y + i) * d[2] + x) * d[3], row,
                  out.mutable_view<float>().begin() + (n * height + i) * row);
  return out;
}

/// Blends the first `extent` rows (axis 1) or columns (axis 2) of `b` with the last ones of `a`.
void blend(const HostArray& a, HostArray& b, size_t axis, int64_t extent) {
  const Dims &da = a.dims(), &db = b.dims();
  extent = std::min({extent, da[axis], db[axis]});
  const auto from = a.view<float>();
  auto to = b.mutable_view<float>();
  for (int64_t n = 0; n < db[0]; ++n)
    for (int64_t y = 0; y < (axis == 1 ? extent : db[1]); ++y)
      for (int64_t x = 0; x < (axis == 2 ? extent : db[2]); ++x) {
        const int64_t k = axis == 1 ? y : x, back = da[axis] - extent;
        const int64_t ya = axis == 1 ? back + y : y, xa = axis == 2 ? back + x : x;
        const auto part = static_cast<float>(static_cast<double>(k) / static_cast<double>(extent));
        for (int64_t c = 0; c < db[3]; ++c) {
          float& v = to[static_cast<size_t>(((n * db[1] + y) * db[2] + x) * db[3] + c)];
          v = from[static_cast<size_t>(((n * da[1] + ya) * da[2] + xa) * da[3] + c)] * (1 - part) + v * part;
        }
      }
}

}  // namespace

HostArray decode_in_tiles(const HostArray& latents, int64_t tile, int64_t scale,
                          const std::function<HostArray(const HostArray&)>& decode) {
  const Dims& d = latents.dims();
  const int64_t step = tile * 3 / 4, extent = tile * scale / 4, retained = tile * scale - extent;
  using Place = std::pair<int64_t, int64_t>;
  std::map<Place, HostArray> tiles;
  std::map<Place, std::vector<Place>> by_size;
  for (int64_t y = 0; y < d[1]; y += step)
    for (int64_t x = 0; x < d[2]; x += step) {
      tiles[{y, x}] = cut(latents, y, x, tile, tile);
      const Dims& size = tiles[{y, x}].dims();
      by_size[{size[1], size[2]}].push_back({y, x});
    }
  for (const auto& [size, places] : by_size)
    for (const Place& p : places) tiles[p] = decode(tiles[p]);

  HostArray out(Shape{DType::f32, {d[0], d[1] * scale, d[2] * scale, tiles.begin()->second.dims()[3]}});
  auto to = out.mutable_view<float>();
  for (auto& [place, t] : tiles) {
    const auto [y, x] = place;
    if (y > 0) blend(tiles.at({y - step, x}), t, 1, extent);
    if (x > 0) blend(tiles.at({y, x - step}), t, 2, extent);
    const HostArray part = cut(t, 0, 0, retained, retained);
    const Dims &p = part.dims(), &o = out.dims();
    const int64_t top = y / step * retained, left = x / step * retained;
    for (int64_t n = 0; n < p[0]; ++n)
      for (int64_t i = 0; i < p[1]; ++i)
        std::copy_n(part.view<float>().begin() + (n * p[1] + i) * p[2] * p[3], p[2] * p[3],
                    to.begin() + ((n * o[1] + top + i) * o[2] + left) * o[3]);
  }
  return out;
}

}  // namespace md
