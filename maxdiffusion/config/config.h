// Configuration: a flat mapping of typed keys from YAML, a parent file (`base:`), and key=value words; structs declare
// their keys with `visit(v)`, calling v("key", member, "meaning") for each.
// Source: ../shared/spec/config.md sections 2–4. Parsing has no side effects.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace md {

/// One key's text and where it came from ("configs/a.yml:12" or "command line").
struct ConfigValue {
  std::string text;  // scalar text, or YAML/JSON flow text of a list or mapping
  std::string where;
  bool is_null = false;
};

/// Raw keys of one run, merged: parents first, then the file, then overrides (the last wins).
class ConfigSource {
 public:
  /// Throws invalid_config: unreadable file, not a mapping, cyclic `base:`, an override without '='.
  static ConfigSource load(const std::string& file, const std::vector<std::string>& overrides);
  static ConfigSource from_text(const std::string& yaml, const std::vector<std::string>& overrides = {});
  const std::map<std::string, ConfigValue>& values() const { return values_; }

 private:
  std::map<std::string, ConfigValue> values_;
};

/// One key as declared by a struct.
struct ConfigKey {
  std::string name, meaning, type, value;  // value: printed as YAML flow text
  std::function<void(const ConfigValue&)> set;
};

/// Collects the keys of structs: `KeyList keys; keys.add(optim); keys.add(mesh); keys.assign(source);`
class KeyList {
 public:
  template <class T>
  void add(T& config) {
    config.visit([this](const char* name, auto& member, const char* meaning) { key(name, member, meaning); });
  }
  /// Sets every member named by the source. Throws invalid_config for an unknown key (file, line, nearest known key)
  /// and for a value of the wrong type (file, line, key, text, expected type).
  void assign(const ConfigSource& source);
  /// All keys with their present values as YAML, sorted; reads back to the same values.
  std::string to_yaml() const;
  const std::vector<ConfigKey>& keys() const { return keys_; }

  void key(const char* name, bool& m, const char* meaning);
  void key(const char* name, int64_t& m, const char* meaning);
  void key(const char* name, double& m, const char* meaning);
  void key(const char* name, std::string& m, const char* meaning);
  void key(const char* name, std::vector<std::string>& m, const char* meaning);
  void key(const char* name, std::vector<int64_t>& m, const char* meaning);
  void key(const char* name, std::map<std::string, std::string>& m, const char* meaning);  // values as flow text

 private:
  std::vector<ConfigKey> keys_;
};

/// The known word nearest to `word` by edit distance, or "" when none is near.
std::string nearest(const std::string& word, const std::vector<std::string>& known);

}  // namespace md
