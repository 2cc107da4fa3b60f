#include "maxdiffusion/base/key_values.h"

#include <fmt/ranges.h>

#include <cmath>

namespace md {

bool is_number(double value) { return std::abs(value) <= kLargestNumber; }

bool KeyRange::contains(double v) const {
  return std::isfinite(v) && (least.excluded ? v > least.value : v >= least.value) &&
         (most.excluded ? v < most.value : v <= most.value);
}

std::string KeyRange::text() const {
  const bool from = std::isfinite(least.value), to = std::isfinite(most.value);
  if (from && to && !least.excluded && !most.excluded) return fmt::format("{} to {}", least.value, most.value);
  std::string end = to ? fmt::format("{} {}", most.excluded ? "below" : "up to", most.value) : "";
  if (!from) return end;
  if (!to) return least.excluded ? fmt::format("above {}", least.value) : fmt::format("{} or more", least.value);
  return fmt::format("{} {} and {}", least.excluded ? "above" : "at least", least.value, end);
}

std::string KeyWords::text() const {
  return fmt::format("one of: {}{}", fmt::join(words, ", "), or_empty ? ", or empty" : "");
}

}  // namespace md
