// Members of scheduler_config.json with defaults: null and absent are the default, a wrong type is an error naming the
// member, what it is and what it should be.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "maxdiffusion/base/error.h"

namespace md {

template <class T>
T member(const nlohmann::json& config, const char* name, T fallback) {
  auto it = config.find(name);
  if (it == config.end() || it->is_null()) return fallback;
  bool right = true;
  const char* expected = "";
  if constexpr (std::is_same_v<T, bool>) {
    right = it->is_boolean(), expected = "true or false";
  } else if constexpr (std::is_integral_v<T>) {
    right = it->is_number_integer(), expected = "a whole number";
  } else if constexpr (std::is_floating_point_v<T>) {
    if (*it == "Infinity" || *it == "-Infinity") return (*it == "Infinity" ? 1 : -1) * HUGE_VAL;
    right = it->is_number(), expected = "a number";
  } else if constexpr (std::is_same_v<T, std::string>) {
    right = it->is_string(), expected = "a string";
  } else {
    right = it->is_array() && std::all_of(it->begin(), it->end(), [](const auto& v) { return v.is_number(); });
    expected = "a list of numbers";
  }
  check(right, Code::invalid_config, "scheduler config: {} is {}; expected {}", name, it->dump(), expected);
  return it->template get<T>();
}

inline std::optional<double> optional_number(const nlohmann::json& config, const char* name) {
  auto it = config.find(name);
  if (it == config.end() || it->is_null()) return std::nullopt;
  return member(config, name, 0.0);
}

/// A string member out of a few.
inline std::string choice(const nlohmann::json& config, const char* name, const std::string& fallback,
                          std::initializer_list<const char*> known) {
  std::string value = member<std::string>(config, name, fallback);
  check(std::find(known.begin(), known.end(), value) != known.end(), Code::invalid_config,
        "scheduler config: {} is '{}'; expected one of: {}", name, value, fmt::join(known, ", "));
  return value;
}

/// A switch that changes the mathematics and that this sampler does not know must be off.
inline void require_off(const nlohmann::json& config, std::initializer_list<const char*> names) {
  for (const char* name : names)
    check(!member(config, name, false), Code::invalid_config,
          "scheduler config: {} is true, which this sampler does not support; set it to false", name);
}

/// Range that x0 is clipped to; 0: it is not.
inline double clip_range(const nlohmann::json& config) {
  if (!member(config, "clip_sample", true)) return 0;
  const double range = member(config, "clip_sample_range", 1.0);
  check(range > 0, Code::invalid_config, "scheduler config: clip_sample_range is {}; expected a number above 0", range);
  return range;
}

/// Switches that only samplers with levels σ know; the others require them off.
inline constexpr std::initializer_list<const char*> kSigmaSwitches = {"use_karras_sigmas", "use_exponential_sigmas",
                                                                      "use_lu_lambdas", "use_flow_sigmas"};

}  // namespace md
