// The median of measured values.
#pragma once

#include <algorithm>
#include <vector>

namespace md {

/// The value that half of `values` are below, the upper one of two middle values; 0 of none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace md
