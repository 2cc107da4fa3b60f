// The value of keys of seeds.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>

namespace md {

/// The seed of a random stream, 0 to 2⁶⁴ − 1, or a negative number: random.
class Seed {
 public:
  constexpr Seed() = default;
  template <std::integral T>
  requires(!std::same_as<T, bool>) constexpr Seed(T value)  // NOLINT: from a number
      : value_(value < 0 ? 0 : static_cast<uint64_t>(value)), random_(value < 0) {}
  constexpr bool is_random() const { return random_; }
  /// 0 if it is random.
  constexpr uint64_t value() const { return value_; }
  /// "-1" if it is random.
  std::string text() const { return random_ ? "-1" : std::to_string(value_); }
  bool operator==(const Seed&) const = default;

 private:
  uint64_t value_ = 0;
  bool random_ = false;
};

}  // namespace md
