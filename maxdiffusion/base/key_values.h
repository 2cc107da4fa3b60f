// The values that a key accepts, part of its declaration in `visit`: v("adam_b1", adam_b1, "decay of the first moment",
// in_range(0, below(1))).
#pragma once

#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace md {

/// Numbers of keys are finite and at most this in size: their squares are finite in float32.
inline constexpr double kLargestNumber = 1e15;
bool is_number(double value);

/// One end of a range.
struct RangeEnd {
  constexpr RangeEnd(double v, bool is_excluded = false) : value(v), excluded(is_excluded) {}  // NOLINT: from a number
  double value;
  bool excluded;
};
constexpr RangeEnd below(double value) { return {value, true}; }
constexpr RangeEnd above(double value) { return {value, true}; }

/// Finite numbers between two ends. For a list key: each of its numbers.
struct KeyRange {
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  RangeEnd least = -kInfinity, most = kInfinity;
  bool or_switch = false;  // true is read as 1, and false as 0
  bool contains(double value) const;
  std::string text() const;  // "0 or more", "at least 0 and below 1"
};
constexpr KeyRange in_range(RangeEnd least, RangeEnd most) { return {.least = least, .most = most}; }
constexpr KeyRange at_least(RangeEnd least) { return {.least = least}; }
constexpr KeyRange at_most(RangeEnd most) { return {.most = most}; }
constexpr KeyRange finite() { return {}; }
constexpr KeyRange or_switch(KeyRange range) {
  range.or_switch = true;
  return range;
}

/// The words that a text key accepts.
struct KeyWords {
  std::vector<std::string> words;
  bool or_empty = false;
  std::string text() const;  // "one of: png, mp4"
};
inline KeyWords one_of(std::vector<std::string> words) { return {std::move(words)}; }
inline KeyWords one_of_or_empty(std::vector<std::string> words) { return {std::move(words), true}; }

/// Marks a key whose value is never printed, not even in errors: `v("api_key", api_key, "…", Secret())`.
struct Secret {};

}  // namespace md
