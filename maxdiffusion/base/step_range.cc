#include "maxdiffusion/base/step_range.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace md {

int64_t StepCount::of(int64_t steps) const {
  constexpr double kMost = 1e12;
  return static_cast<int64_t>(std::clamp(is_part ? value * static_cast<double>(steps) : value, -kMost, kMost));
}

std::optional<StepCount> read_step_count(const std::string& text) {
  constexpr const char* kBlanks = " \t\r\n";
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == text.npos) return std::nullopt;
  std::string number = text.substr(first, text.find_last_not_of(kBlanks) + 1 - first);
  if (number.starts_with('+')) number.erase(0, 1);
  StepCount out{0, number.find('.') != number.npos};
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), out.value);
  if (error != std::errc() || end != number.data() + number.size() || !std::isfinite(out.value)) return std::nullopt;
  return out;
}

std::optional<StepRange> read_step_range(const std::string& text) {
  StepRange out;
  const size_t dash = text.find('-');
  if (text.find_first_not_of(' ') == text.npos) return out;
  if (dash == text.npos) return std::nullopt;
  const std::string from = text.substr(0, dash), to = text.substr(dash + 1);
  const auto is_blank = [](const std::string& s) { return s.find_first_not_of(' ') == s.npos; };
  const auto first = read_step_count(is_blank(from) ? "0" : from);
  if (!is_blank(to)) out.to = read_step_count(to);
  if (!first || first->value < 0 || (!is_blank(to) && (!out.to || out.to->value < 0))) return std::nullopt;
  out.from = *first;
  return out;
}

}  // namespace md
