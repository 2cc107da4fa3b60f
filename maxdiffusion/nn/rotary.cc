#include "maxdiffusion/nn/rotary.h"

#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/shape.h"

namespace md::nn {
namespace {

struct Tables {
  HostArray cosines, sines;  // f32 [positions, size / 2]
};

/// Tables for positions first, first + 1, …
Tables tables_of(int64_t first, int64_t places, int64_t size, double theta) {
  const int64_t half = size / 2;
  const Shape shape{DType::f32, {places, half}};
  Tables t{HostArray(shape), HostArray(shape)};
  auto cosines = t.cosines.mutable_view<float>(), sines = t.sines.mutable_view<float>();
  for (int64_t k = 0; k < places * half; ++k) {
    const double exponent = static_cast<double>(2 * (k % half)) / static_cast<double>(size);
    const int64_t place = first + k / half;
    const double angle = static_cast<double>(place) / std::pow(theta, exponent);
    cosines[static_cast<size_t>(k)] = static_cast<float>(std::cos(angle));
    sines[static_cast<size_t>(k)] = static_cast<float>(std::sin(angle));
  }
  return t;
}

/// f32 [n, 2n]: times it, numbers a, b, … become a, a, b, b, …
Tensor repeats(Graph& g, int64_t n) {
  HostArray m = zeros_like(HostArray(Shape{DType::f32, {n, 2 * n}}));
  auto v = m.mutable_view<float>();
  for (int64_t i = 0; i < n; ++i)
    v[static_cast<size_t>(i * 2 * n + 2 * i)] = v[static_cast<size_t>(i * 2 * n + 2 * i + 1)] = 1;
  return constant(g, m);
}

/// [d, d]: times it, neighbours a, b become −b, a.
Tensor quarter_turn(Graph& g, int64_t d, DType type) {
  HostArray m = zeros_like(HostArray(Shape{DType::f32, {d, d}}));
  auto v = m.mutable_view<float>();
  for (int64_t i = 0; i < d; i += 2) {
    v[static_cast<size_t>((i + 1) * d + i)] = -1;
    v[static_cast<size_t>(i * d + i + 1)] = 1;
  }
  return constant(g, m.cast(type));
}

/// Rotates neighbours without taking them apart, which on TPUs turns whole arrays in memory: their matrix units
/// exchange them, exactly.
Tensor rotated_in_place(Tensor x, const Rotary& r) {
  Graph& g = x.graph();
  const auto times = [](Tensor a, Tensor m) {
    return cast(dot(a, m, {.lhs_contract = {-1}, .rhs_contract = {0}, .precision = Precision::highest}), DType::f32);
  };
  const Tensor twice = repeats(g, x.dim(3) / 2);
  return cast(cast(x, DType::f32) * times(r.cosines, twice) +
                  times(x, quarter_turn(g, x.dim(3), x.dtype())) * times(r.sines, twice),
              x.dtype());
}

}  // namespace

Rotary grid_rotary(Graph& g, const Dims& grid, const Dims& sizes, double theta, const Dims& offsets) {
  std::vector<Tensor> cosines, sines;
  for (size_t i = 0; i < grid.size(); ++i) {
    const int64_t half = sizes.at(i) / 2;
    if (half == 0) continue;
    Dims dims(grid.size() + 1, 1), all = grid;  // small tables, which the program broadcasts over the grid
    dims[i] = grid[i], dims.back() = half;
    all.push_back(half);
    const Tables t = tables_of(offsets.empty() ? 0 : offsets.at(i), grid[i], sizes[i], theta);
    cosines.push_back(broadcast_to(constant(g, t.cosines.reshaped(dims)), all));
    sines.push_back(broadcast_to(constant(g, t.sines.reshaped(dims)), all));
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

Rotary rotary_at(Tensor places, const Dims& limits, const Dims& sizes, double theta) {
  std::vector<Tensor> cosines, sines;
  Graph& g = places.graph();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) continue;
    const auto axis = static_cast<int64_t>(i);
    Tensor index = squeeze(slice_axis(places, 2, axis, axis + 1), 2);  // [B, S]
    const Tables t = tables_of(0, limits.at(i), sizes[i], theta);
    cosines.push_back(take(constant(g, t.cosines), index));
    sines.push_back(take(constant(g, t.sines), index));
  }
  return {expand_dims(concatenate(cosines, 2), 2), expand_dims(concatenate(sines, 2), 2)};
}

Tensor rotated(Tensor x, const Rotary& r, RotaryPairs pairs) {
  const Dims& d = x.dims();
  const bool halves = pairs == RotaryPairs::halves;
  if (!halves && x.graph().options().platform == Platform::tpu) return rotated_in_place(x, r);
  const int64_t axis = halves ? 3 : 4;  // axis of the two members of a pair
  Tensor members =
      reshape(cast(x, DType::f32), halves ? Dims{d[0], d[1], d[2], 2, d[3] / 2} : Dims{d[0], d[1], d[2], d[3] / 2, 2});
  Tensor a = squeeze(slice_axis(members, axis, 0, 1), axis), b = squeeze(slice_axis(members, axis, 1, 2), axis);
  return cast(concatenate({a * r.cosines - b * r.sines, a * r.sines + b * r.cosines}, 3), x.dtype());
}

}  // namespace md::nn
