#include "maxdiffusion/schedulers/config_fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"

namespace md {
namespace {

using nlohmann::json;

/// Reads the field as a T; `right`: whether the JSON has that type; `expected`: text for messages.
template <class T, class Right>
T read(const json& config, const char* name, T fallback, const char* expected, const Right& right) {
  const auto it = config.find(name);
  if (it == config.end() || it->is_null()) return fallback;
  check(right(*it), Code::invalid_config, "scheduler config: {} is {}; expected {}", name, dump_json(*it), expected);
  return it->template get<T>();
}

bool is_numbers(const json& v) {
  return v.is_array() && std::all_of(v.begin(), v.end(), [](const json& n) { return n.is_number(); });
}

}  // namespace

template <>
bool field(const json& config, const char* name, bool fallback) {
  return read(config, name, fallback, "true or false", [](const json& v) { return v.is_boolean(); });
}
template <>
int64_t field(const json& config, const char* name, int64_t fallback) {
  return read(config, name, fallback, "a whole number", [](const json& v) { return v.is_number_integer(); });
}
template <>
double field(const json& config, const char* name, double fallback) {
  if (const auto it = config.find(name); it != config.end() && it->is_string()) {
    if (*it == "Infinity") return HUGE_VAL;
    if (*it == "-Infinity") return -HUGE_VAL;
  }
  return read(config, name, fallback, "a number",
              [](const json& v) { return v.is_number() && !std::isnan(v.get<double>()); });
}
template <>
std::string field(const json& config, const char* name, std::string fallback) {
  return read(config, name, std::move(fallback), "a string", [](const json& v) { return v.is_string(); });
}
template <>
std::vector<double> field(const json& config, const char* name, std::vector<double> fallback) {
  return read(config, name, std::move(fallback), "a list of numbers", is_numbers);
}
template <>
std::vector<int64_t> field(const json& config, const char* name, std::vector<int64_t> fallback) {
  return read(config, name, std::move(fallback), "a list of numbers", is_numbers);
}

std::optional<double> optional_number(const json& config, const char* name) {
  const auto it = config.find(name);
  if (it == config.end() || it->is_null()) return std::nullopt;
  return field(config, name, 0.0);
}

std::string choice(const json& config, const char* name, const std::string& fallback,
                   std::initializer_list<const char*> known) {
  std::string value = field<std::string>(config, name, fallback);
  check(std::find(known.begin(), known.end(), value) != known.end(), Code::invalid_config,
        "scheduler config: {} is '{}'; expected one of: {}", name, value, fmt::join(known, ", "));
  return value;
}

void require_off(const json& config, std::initializer_list<const char*> names) {
  for (const char* name : names)
    check(!field(config, name, false), Code::invalid_config,
          "scheduler config: {} is true, which this sampler does not support; set it to false", name);
}

void require_no_sigma_schedule(const json& config) {
  require_off(config, kSigmaSwitches);
  const auto schedule = field<std::string>(config, "sigma_schedule", "");
  check(schedule.empty(), Code::invalid_config,
        "sigma_schedule is '{}', but {} steps over timesteps, not sigmas; expected empty, or a sampler such as "
        "scheduler=euler",
        schedule, field<std::string>(config, "_class_name", "this sampler"));
}

double clip_range(const json& config) {
  if (!field(config, "clip_sample", true)) return 0;
  const double range = field(config, "clip_sample_range", 1.0);
  check(range > 0, Code::invalid_config, "scheduler config: clip_sample_range is {}; expected a number above 0", range);
  return range;
}

std::optional<Threshold> threshold_of(const json& config) {
  if (!field(config, "thresholding", false)) return {};
  const Threshold t{field(config, "dynamic_thresholding_ratio", 0.995), field(config, "sample_max_value", 1.0)};
  check(t.ratio >= 0 && t.ratio <= 1, Code::invalid_config,
        "scheduler config: dynamic_thresholding_ratio is {}; expected 0 to 1", t.ratio);
  check(t.most > 0, Code::invalid_config, "scheduler config: sample_max_value is {}; expected a number above 0",
        t.most);
  return t;
}

bool continuous_timesteps(const json& config) {
  return choice(config, "timestep_type", "discrete", {"discrete", "continuous"}) == "continuous" &&
         field<std::string>(config, "prediction_type", "epsilon") == "v_prediction";
}

}  // namespace md
