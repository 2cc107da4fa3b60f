#include "maxdiffusion/models/config_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "maxdiffusion/base/parse_json.h"

namespace md {

namespace {

/// Limits on sizes, because absurd ones would allocate all memory before the weights are checked.
int64_t sane(const std::string& what, std::string_view key, const nlohmann::json& v) {
  const int64_t most = is_count(key) ? 1000 : 1 << 24;
  const bool fits = v.is_number_unsigned() ? v.get<uint64_t>() <= static_cast<uint64_t>(most)
                                           : v.get<int64_t>() >= -most && v.get<int64_t>() <= most;
  check(fits, Code::invalid_config, "{}: '{}' is {}; no model has more than {}", what, key, v.dump(), most);
  return v.get<int64_t>();
}

}  // namespace

bool is_count(std::string_view key) {
  return key.find("layers") != std::string_view::npos || key.find("res_blocks") != std::string_view::npos;
}

ConfigReader::ConfigReader(const nlohmann::json& config, std::string what) : config_(config), what_(std::move(what)) {
  check(config.is_object(), Code::invalid_config, "{}: found JSON of type {}, expected an object", what_,
        config.type_name());
}

const nlohmann::json* ConfigReader::find(const char* key) {
  read_.insert(key);
  auto it = config_.find(key);
  return it == config_.end() || it->is_null() ? nullptr : &*it;
}

void ConfigReader::positive(std::initializer_list<std::pair<const char*, int64_t>> fields) const {
  for (const auto& [key, v] : fields)
    check(v > 0, Code::invalid_config, "{}: '{}' is {}, expected a positive number", what_, key, v);
}

void ConfigReader::wrong_type(const char* key, const nlohmann::json& v, const char* expected) const {
  fail(Code::invalid_config, "{}: '{}' is {}, expected {}", what_, key, dump_json(v), expected);
}

template <>
int64_t ConfigReader::as(const char* key, const nlohmann::json& v) const {
  if (!v.is_number_integer()) wrong_type(key, v, "an integer");
  return sane(what_, key, v);
}
template <>
double ConfigReader::as(const char* key, const nlohmann::json& v) const {
  if (!v.is_number()) wrong_type(key, v, "a number");
  return v.get<double>();
}
template <>
bool ConfigReader::as(const char* key, const nlohmann::json& v) const {
  if (!v.is_boolean()) wrong_type(key, v, "true or false");
  return v.get<bool>();
}
template <>
std::string ConfigReader::as(const char* key, const nlohmann::json& v) const {
  if (!v.is_string()) wrong_type(key, v, "a string");
  return v.get<std::string>();
}
template <>
std::vector<int64_t> ConfigReader::as(const char* key, const nlohmann::json& v) const {
  if (!v.is_array() || !std::all_of(v.begin(), v.end(), [](const auto& e) { return e.is_number_integer(); }))
    wrong_type(key, v, "a list of integers");
  std::vector<int64_t> all;
  for (const auto& e : v) all.push_back(sane(what_, key, e));
  return all;
}
template <>
std::vector<double> ConfigReader::as(const char* key, const nlohmann::json& v) const {
  if (!v.is_array() || !std::all_of(v.begin(), v.end(), [](const auto& e) { return e.is_number(); }))
    wrong_type(key, v, "a list of numbers");
  return v.get<std::vector<double>>();
}
template <>
std::vector<bool> ConfigReader::as(const char* key, const nlohmann::json& v) const {
  if (!v.is_array() || !std::all_of(v.begin(), v.end(), [](const auto& e) { return e.is_boolean(); }))
    wrong_type(key, v, "a list of true or false");
  return v.get<std::vector<bool>>();
}
template <>
std::vector<std::string> ConfigReader::as(const char* key, const nlohmann::json& v) const {
  if (!v.is_array() || !std::all_of(v.begin(), v.end(), [](const auto& e) { return e.is_string(); }))
    wrong_type(key, v, "a list of strings");
  return v.get<std::vector<std::string>>();
}

bool ConfigReader::is_list(const nlohmann::json& v) { return v.is_array(); }

void ConfigReader::neutral(const char* key, std::initializer_list<PlainValue> values) {
  const nlohmann::json* v = find(key);
  if (!v) return;
  std::vector<std::string> accepted;
  for (const PlainValue& a : values) {
    const nlohmann::json one = std::visit([](const auto& value) { return nlohmann::json(value); }, a.value);
    if (*v == one) return;
    accepted.push_back(one.dump());
  }
  accepted.push_back("null");
  fail(Code::invalid_config, "{}: '{}' is {}, which is not supported; accepted: {}", what_, key, v->dump(),
       fmt::join(accepted, ", "));
}

void ConfigReader::ignore(std::initializer_list<const char*> keys) { read_.insert(keys.begin(), keys.end()); }

void ConfigReader::finish() const {
  // What diffusers' EMAModel adds to a config when it saves averaged weights, as in the folder unet_ema.
  static const std::set<std::string> kOfAverages = {
      "decay", "min_decay", "inv_gamma", "power", "optimization_step", "update_after_step", "use_ema_warmup"};
  for (const auto& [key, value] : config_.items())
    check(read_.contains(key) || kOfAverages.contains(key) || key.starts_with('_'), Code::invalid_config,
          "{}: unknown field '{}' (value {}); expected only fields that this program supports", what_, key,
          value.dump());
}

}  // namespace md
