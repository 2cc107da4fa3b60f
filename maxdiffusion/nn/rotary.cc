#include "maxdiffusion/nn/rotary.h"

#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md::nn {

Rotary grid_rotary(Graph& g, const Dims& grid, const Dims& sizes) {
  std::vector<Tensor> cosines, sines;
  for (size_t i = 0; i < grid.size(); ++i) {
    const int64_t half = sizes.at(i) / 2;
    if (half == 0) continue;
    Dims dims(grid.size() + 1, 1), all = grid;  // small tables, which the program spreads over the grid
    dims[i] = grid[i], dims.back() = half;
    all.push_back(half);
    HostArray cos_table({DType::f32, dims}), sin_table({DType::f32, dims});
    auto cos_row = cos_table.mutable_view<float>(), sin_row = sin_table.mutable_view<float>();
    for (int64_t k = 0; k < grid[i] * half; ++k) {
      const double exponent = static_cast<double>(2 * (k % half)) / static_cast<double>(sizes[i]);
      const int64_t place = k / half;
      const double angle = static_cast<double>(place) / std::pow(10000.0, exponent);
      cos_row[static_cast<size_t>(k)] = static_cast<float>(std::cos(angle));
      sin_row[static_cast<size_t>(k)] = static_cast<float>(std::sin(angle));
    }
    cosines.push_back(broadcast_to(constant(g, cos_table), all));
    sines.push_back(broadcast_to(constant(g, sin_table), all));
  }
  const auto axis = static_cast<int64_t>(grid.size());
  const int64_t features = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const Dims tokens = {1, std::accumulate(grid.begin(), grid.end(), int64_t{1}, std::multiplies<>()), 1, features / 2};
  return {reshape(concatenate(cosines, axis), tokens), reshape(concatenate(sines, axis), tokens)};
}

Rotary with_unrotated_prefix(int64_t tokens, const Rotary& r) {
  const Dims before = {0, tokens, 0, 0}, after = {0, 0, 0, 0};
  return {pad(r.cosines, 1, before, after), pad(r.sines, 0, before, after)};
}

Tensor rotated(Tensor x, const Rotary& r) {
  const Dims& dims = x.dims();
  Tensor pairs = reshape(cast(x, DType::f32), {dims[0], dims[1], dims[2], dims[3] / 2, 2});
  Tensor a = squeeze(slice_axis(pairs, -1, 0, 1), -1), b = squeeze(slice_axis(pairs, -1, 1, 2), -1);
  return cast(concatenate({a * r.cosines - b * r.sines, a * r.sines + b * r.cosines}, 3), x.dtype());
}

}  // namespace md::nn
