// Reads the fields of a model's config.json and records which were read, so that none is silently ignored: unsupported
// fields that change the architecture must have their default.
#pragma once

#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {

/// Whether a config field is a count of layers or blocks ("num_layers"), not a size.
bool is_count(std::string_view key);

/// A value of a config field.
struct PlainValue {
  std::variant<bool, int64_t, double, std::string> value;
  PlainValue(bool v) : value(v) {}                      // NOLINT: implicit
  PlainValue(int v) : value(int64_t{v}) {}              // NOLINT
  PlainValue(double v) : value(v) {}                    // NOLINT
  PlainValue(const char* v) : value(std::string(v)) {}  // NOLINT
};

class ConfigReader {
 public:
  /// `what` opens every message: "UNet2DConditionModel config". `config` must outlive the reader.
  ConfigReader(const nlohmann::json& config, std::string what);

  /// The field, or `fallback` if it is absent or null. Throws invalid_config when the type is wrong.
  template <class T>
  T get(const char* key, T fallback) {
    const nlohmann::json* v = find(key);
    return v ? as<T>(key, *v) : fallback;
  }
  template <class T>
  std::optional<T> get_optional(const char* key) {
    const nlohmann::json* v = find(key);
    return v ? std::optional<T>(as<T>(key, *v)) : std::nullopt;
  }
  /// A single value for all levels, or a list of `levels` values.
  template <class T>
  std::vector<T> per_level(const char* key, size_t levels, T fallback) {
    const nlohmann::json* v = find(key);
    if (!v || !is_list(*v)) return std::vector<T>(levels, v ? as<T>(key, *v) : fallback);
    auto list = as<std::vector<T>>(key, *v);
    check(list.size() == levels, Code::invalid_config, "{}: '{}' has {} entries, expected {} (one per level)", what_,
          key, list.size(), levels);
    return list;
  }
  /// Throws unless the field is absent, null or one of `values`.
  void neutral(const char* key, std::initializer_list<PlainValue> values = {});
  /// Throws unless all values, by their fields, are above 0.
  void positive(std::initializer_list<std::pair<const char*, int64_t>> fields) const;
  /// Marks fields as read that do not affect the graph.
  void ignore(std::initializer_list<const char*> keys);
  /// Throws for unread fields, except those that begin with '_', which are diffusers' notes.
  void finish() const;

  const std::string& what() const { return what_; }

 private:
  const nlohmann::json* find(const char* key);  // null: absent or null
  static bool is_list(const nlohmann::json& v);
  template <class T>
  T as(const char* key, const nlohmann::json& v) const;
  [[noreturn]] void wrong_type(const char* key, const nlohmann::json& v, const char* expected) const;

  const nlohmann::json& config_;
  std::string what_;
  std::set<std::string> read_;
};

template <>
int64_t ConfigReader::as(const char* key, const nlohmann::json& v) const;
template <>
double ConfigReader::as(const char* key, const nlohmann::json& v) const;
template <>
bool ConfigReader::as(const char* key, const nlohmann::json& v) const;
template <>
std::string ConfigReader::as(const char* key, const nlohmann::json& v) const;
template <>
std::vector<int64_t> ConfigReader::as(const char* key, const nlohmann::json& v) const;
template <>
std::vector<double> ConfigReader::as(const char* key, const nlohmann::json& v) const;
template <>
std::vector<bool> ConfigReader::as(const char* key, const nlohmann::json& v) const;
template <>
std::vector<std::string> ConfigReader::as(const char* key, const nlohmann::json& v) const;

}  // namespace md
