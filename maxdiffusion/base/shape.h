// Shape: element type and sizes. Axes count from 0; negative axes count from the end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/base/dtype.h"

namespace md {

using Dims = std::vector<int64_t>;
using Axes = std::vector<int64_t>;

struct Shape {
  DType dtype = DType::f32;
  Dims dims;

  int64_t rank() const { return static_cast<int64_t>(dims.size()); }
  /// Size of axis i, negative counts from the end. Throws invalid_graph when out of range.
  int64_t dim(int64_t i) const;
  int64_t elements() const;
  int64_t bytes() const { return elements() * static_cast<int64_t>(size_of(dtype)); }
  bool operator==(const Shape&) const = default;
};

/// "f32[2,77,768]".
std::string to_string(const Shape& s);
/// "[2,77,768]".
std::string to_string(const Dims& d);
/// "tensor<2x77x768xf32>".
std::string mlir_type(const Shape& s);
/// Permutes per-axis values: result[i] = values[order[i]]. An empty `order` is the identity.
template <class T>
std::vector<T> in_order(const std::vector<T>& of_axes, const Axes& order) {
  if (order.empty()) return of_axes;
  std::vector<T> out;
  for (int64_t a : order) out.push_back(of_axes[static_cast<size_t>(a)]);
  return out;
}
/// The inverse permutation.
Axes inverse(const Axes& order);
/// Axis i of a tensor of this rank as a number in [0, rank). Throws invalid_graph when out of range.
int64_t normalize_axis(int64_t axis, int64_t rank);

}  // namespace md
