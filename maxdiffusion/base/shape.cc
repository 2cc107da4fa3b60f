#include "maxdiffusion/base/shape.h"

#include "maxdiffusion/base/error.h"

namespace md {

int64_t normalize_axis(int64_t axis, int64_t rank) {
  check(axis >= -rank && axis < rank, Code::invalid_graph, "axis {} is out of range for rank {}", axis, rank);
  return axis < 0 ? axis + rank : axis;
}

int64_t Shape::dim(int64_t i) const {
  check(i >= -rank() && i < rank(), Code::invalid_graph, "axis {} is out of range for {}", i, to_string(*this));
  return dims[static_cast<size_t>(i < 0 ? i + rank() : i)];
}

int64_t Shape::elements() const {
  int64_t n = 1;
  for (int64_t d : dims) n *= d;
  return n;
}

Axes inverse(const Axes& order) {
  Axes back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  return back;
}

std::string to_string(const Dims& d) {
  std::string s = "[";
  for (size_t i = 0; i < d.size(); ++i) s += (i ? "," : "") + std::to_string(d[i]);
  return s + "]";
}

std::string to_string(const Shape& s) { return std::string(to_string(s.dtype)) + to_string(s.dims); }

std::string mlir_type(const Shape& s) {
  std::string t = "tensor<";
  for (int64_t d : s.dims) t += std::to_string(d) + "x";
  return t + std::string(mlir_name(s.dtype)) + ">";
}

}  // namespace md
