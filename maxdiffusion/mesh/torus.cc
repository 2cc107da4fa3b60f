#include "maxdiffusion/mesh/torus.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

namespace md {
namespace {

/// A run of equally spaced positions along one physical axis: position = offset of the others + stride·i, i < size.
struct Factor {
  size_t axis;  // physical
  int64_t size, stride;
};

/// Factors of the physical axes: whole axes, or with `split` their prime factors; the smallest stride is used first.
std::vector<Factor> factors(const std::vector<int64_t>& grid, bool split) {
  std::vector<Factor> out;
  for (size_t a = 0; a < grid.size(); ++a) {
    if (!split) {
      if (grid[a] > 1) out.push_back({a, grid[a], 1});
      continue;
    }
    int64_t rest = grid[a], stride = 1;
    for (int64_t p = 2; rest > 1; ++p) {
      for (; rest % p == 0; rest /= p, stride *= p) out.push_back({a, p, stride});
    }
  }
  return out;
}

/// Factors for each mesh axis, the innermost mesh axis choosing first; depth-first over subsets.
bool assign(const std::vector<int64_t>& sizes, size_t remaining_axes, const std::vector<Factor>& free,
            std::vector<bool>& used, std::vector<std::vector<Factor>>& chosen);

bool choose(const std::vector<int64_t>& sizes, size_t axis, int64_t rest, size_t from, const std::vector<Factor>& free,
            std::vector<bool>& used, std::vector<std::vector<Factor>>& chosen) {
  if (rest == 1) return assign(sizes, axis, free, used, chosen);
  for (size_t i = from; i < free.size(); ++i) {
    if (used[i] || rest % free[i].size != 0) continue;
    used[i] = true;
    chosen[axis].push_back(free[i]);
    if (choose(sizes, axis, rest / free[i].size, i + 1, free, used, chosen)) return true;
    chosen[axis].pop_back();
    used[i] = false;
  }
  return false;
}

bool assign(const std::vector<int64_t>& sizes, size_t remaining_axes, const std::vector<Factor>& free,
            std::vector<bool>& used, std::vector<std::vector<Factor>>& chosen) {
  if (remaining_axes == 0) return true;
  return choose(sizes, remaining_axes - 1, sizes[remaining_axes - 1], 0, free, used, chosen);
}

/// Sizes of the coordinate grid and the device at each point; none if the devices do not fill a grid.
struct Grid {
  std::vector<int64_t> sizes;
  std::map<std::vector<int64_t>, int> at;
};
std::optional<Grid> grid_of(const std::vector<DeviceInfo>& devices) {
  if (devices.empty() || devices[0].coords.empty()) return {};
  const size_t rank = devices[0].coords.size();
  std::vector<int> low = devices[0].coords, high = low;
  for (const auto& d : devices) {
    if (d.coords.size() != rank) return {};
    for (size_t i = 0; i < rank; ++i) {
      low[i] = std::min(low[i], d.coords[i]);
      high[i] = std::max(high[i], d.coords[i]);
    }
  }
  Grid g;
  for (size_t i = 0; i < rank; ++i) g.sizes.push_back(high[i] - low[i] + 1);
  // Chips with several cores share a point: the core, in id order, is another axis, the fastest.
  std::map<std::vector<int64_t>, int64_t> cores;
  for (const auto& d : devices) {
    std::vector<int64_t> point;
    for (size_t i = 0; i < rank; ++i) point.push_back(d.coords[i] - low[i]);
    const int64_t core = cores[point]++;
    point.push_back(core);
    g.at[point] = d.id;
  }
  const int64_t points = std::accumulate(g.sizes.begin(), g.sizes.end(), int64_t{1}, std::multiplies<>());
  const auto per_point = static_cast<int64_t>(devices.size()) / points;
  if (points * per_point != static_cast<int64_t>(devices.size())) return {};
  for (const auto& [point, n] : cores)
    if (n != per_point) return {};
  g.sizes.push_back(per_point);
  return g;
}

}  // namespace

std::vector<int> torus_order(const std::vector<DeviceInfo>& devices, const std::vector<int64_t>& sizes, bool split) {
  std::vector<int> order;
  for (const auto& d : devices) order.push_back(d.id);
  const auto grid = grid_of(devices);
  if (!grid) return order;
  // Cores of a chip are nearest to each other, so they are assigned first; then x, y, z.
  std::vector<int64_t> physical = grid->sizes;
  std::rotate(physical.begin(), physical.end() - 1, physical.end());
  const auto free = factors(physical, split);
  std::vector<bool> used(free.size());
  std::vector<std::vector<Factor>> chosen(sizes.size());
  if (!assign(sizes, sizes.size(), free, used, chosen)) return order;
  for (size_t d = 0; d < order.size(); ++d) {
    std::vector<int64_t> point(physical.size(), 0);
    auto rest = static_cast<int64_t>(d);
    for (size_t axis = sizes.size(); axis-- > 0;) {
      int64_t along = rest % sizes[axis];
      rest /= sizes[axis];
      for (const auto& f : chosen[axis]) {  // first factor fastest
        point[f.axis] += (along % f.size) * f.stride;
        along /= f.size;
      }
    }
    std::rotate(point.begin(), point.begin() + 1, point.end());
    order[d] = grid->at.at(point);
  }
  return order;
}

}  // namespace md
