// Steps of one image as users write them: a number of steps, 5, or with a decimal point a part of all, 0.5.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace md {

struct StepCount {
  double value = 0;
  bool is_part = false;
  /// Of `steps` steps, rounded towards 0.
  int64_t of(int64_t steps) const;
};
/// "5", "0.5", ".5", with a sign and blanks around it or not. None for other texts.
std::optional<StepCount> read_step_count(const std::string& text);

/// The steps, counted from 0, from `from` on and before `to`, if there is an end.
struct StepRange {
  StepCount from = {};
  std::optional<StepCount> to = {};
  bool is_whole() const { return from.value <= 0 && !to; }
  bool has(int64_t step, int64_t steps) const { return from.of(steps) <= step && (!to || step < to->of(steps)); }
};
/// "5-10", "0.2-0.8", "5-", "-10"; "-" and "": all steps. None for other texts.
std::optional<StepRange> read_step_range(const std::string& text);

}  // namespace md
