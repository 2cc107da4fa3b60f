// Configuration: a flat mapping of typed keys from YAML, a parent file (`base:`), and key=value words; structs declare
// their keys with `visit(v)`, calling v("key", member, "meaning") for each. A fourth argument restricts the value: a
// range of numbers or a list of words (base/key_values.h), or marks it as a path (base/key_path.h). The member's type
// is the key's type.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "maxdiffusion/base/json_text.h"
#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/base/seed.h"

namespace md {

inline constexpr const char* kCommandLine = "command line";
/// One key's text and its source ("configs/a.yml:12" or kCommandLine).
struct ConfigValue {
  enum class Kind { plain, quoted, list, mapping, word };  // word: command-line text, typed by its key alone
  std::string text;                                        // scalar text, or flow text of a list or mapping
  std::string where;
  Kind kind = Kind::plain;
  bool is_null = false;     // YAML's null; a command-line "null" is decided by the key's type
  std::string folder = {};  // folder of the file; empty: the working folder
  int64_t layer = 0;        // priority: parents, the file, the command line
};

/// A key that was renamed, or whose values were.
struct KeyRename {
  std::string former, key;                         // equal: only values were renamed
  std::map<std::string, std::string> values = {};  // former → now
};

/// Raw keys of one run, merged: parents first, then the file, then overrides (the last wins).
/// A list or mapping replaces the parent's whole value.
class ConfigSource {
 public:
  /// `base: other.yml` in a file names its parent, relative to that file. A key written twice in one file is logged as
  /// a warning, the last wins. Throws invalid_config: unreadable file, not one mapping, a custom tag (!!python/…),
  /// cyclic `base:`, an override without '='. Overrides are split at their first '='.
  static ConfigSource load(const std::string& file, const std::vector<std::string>& overrides);
  /// Like load, from text; `base:` is relative to the working folder.
  static ConfigSource from_text(const std::string& yaml, const std::vector<std::string>& overrides = {});
  /// Replaces former names of keys and values by their current ones, with a log line for each. If a key is given under
  /// both names, the value wins that would win under one name; in one file, the one under the new name.
  void rename(const std::vector<KeyRename>& renames);
  const std::map<std::string, ConfigValue>& values() const { return values_; }
  /// Removes a key.
  void drop(const std::string& key) { values_.erase(key); }
  /// The value from files of a key that the command line overrides; null if there is none.
  const ConfigValue* overridden(const std::string& key) const {
    const auto found = overridden_.find(key);
    return found == overridden_.end() ? nullptr : &found->second;
  }

 private:
  void merge_file(const std::string& file, std::vector<std::string> chain);
  void merge_text(const std::string& yaml, const std::string& file, const std::vector<std::string>& chain);
  void merge_words(const std::vector<std::string>& overrides);

  std::map<std::string, ConfigValue> values_, overridden_;
  int64_t layers_ = 0;
};

/// Prompts. A value is one text, including brackets, commas and parentheses. In YAML only a YAML list is a list. On the
/// command line a list is either quoted texts, ["a", "b"] (also Python's ['a', 'b'] and ('a', 'b')), or a YAML list of
/// two or more texts, [a, b]. There [bad] is a text, and [] the empty list.
struct Texts : std::vector<std::string> {
  using std::vector<std::string>::vector;
  explicit Texts(std::vector<std::string> texts) : vector(std::move(texts)) {}
};
/// A list of texts for which null, also on the command line, is the empty list.
struct OptionalTexts : Texts {
  using Texts::Texts;
  explicit OptionalTexts(Texts texts) : Texts(std::move(texts)) {}
};

/// Throws invalid_config unless is_number(value).
void check_number(const char* name, double value);
/// The same for all numbers of a struct, whose values may come from elsewhere than KeyList::assign.
template <class T>
void check_numbers(T config) {
  config.visit([](const char* name, const auto& member, auto&&...) {
    using Member = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<Member, double>) {
      check_number(name, member);
    } else if constexpr (std::is_same_v<Member, std::optional<double>>) {
      if (member) check_number(name, *member);
    } else if constexpr (std::is_same_v<Member, std::vector<double>>) {
      for (const double value : member) check_number(name, value);
    }
  });
}

/// One key as declared by a struct.
struct ConfigKey {
  std::string name, meaning, type;
  std::function<void(const ConfigValue&)> set;  // throws invalid_config for an invalid value
  std::function<std::string()> print;           // the current value as YAML flow text
  KeyPath path = KeyPath::none;
  std::function<std::vector<std::string*>()> paths = {};  // pointers to its texts, if they are paths
  std::optional<KeyRange> range = {};
  std::optional<KeyWords> words = {};

  /// "adam_b1: 0.9  # decay of the first moment [at least 0 and below 1]".
  std::string line() const;
};

/// Collects the keys of structs, which must outlive it: `KeyList keys; keys.add(optim); keys.add(mesh);
/// keys.assign(source);`
class KeyList {
 public:
  template <class T>
  void add(T& config) {
    config.visit([this](const char* name, auto& member, const char* meaning, auto&&... accepted) {
      key(name, member, meaning, accepted...);
    });
  }
  /// Rewrites `--key=value`, `--key value` and, for boolean keys, `--key` as key=value; `-` in a key becomes `_`.
  /// Throws invalid_config for a key without its value.
  std::vector<std::string> overrides(const std::vector<std::string>& words) const;
  /// Sets every member named by the source. Throws invalid_config for an unknown key (with file, line, and its hint in
  /// `hints` or the nearest known key) and for an invalid value (file, line, key, text, expected).
  void assign(const ConfigSource& source, const std::map<std::string, std::string>& hints = {});
  /// Makes relative paths absolute.
  void make_paths_absolute();
  /// All keys with their current values as YAML, sorted; reads back to the same values.
  std::string to_yaml() const;
  /// Values by name.
  std::map<std::string, std::string> values() const;
  const std::vector<ConfigKey>& keys() const { return keys_; }

  void key(const char* name, bool& m, const char* meaning);
  void key(const char* name, int64_t& m, const char* meaning, const std::optional<KeyRange>& range = {});
  void key(const char* name, double& m, const char* meaning, const std::optional<KeyRange>& range = {});
  void key(const char* name, Seed& m, const char* meaning);
  void key(const char* name, std::optional<Seed>& m, const char* meaning);
  void key(const char* name, std::string& m, const char* meaning, KeyPath path = KeyPath::none);  // null, None: empty
  void key(const char* name, std::string& m, const char* meaning, const KeyWords& words);
  void key(const char* name, std::string& m, const char* meaning, Secret);  // errors do not print its value
  void key(const char* name, std::optional<bool>& m, const char* meaning);  // null: none
  void key(const char* name, std::optional<int64_t>& m, const char* meaning, const std::optional<KeyRange>& range = {});
  void key(const char* name, std::optional<double>& m, const char* meaning, const std::optional<KeyRange>& range = {});
  /// Names and paths. A single text is a list of one; on the command line a list needs no quotes: [a, b].
  void key(const char* name, std::vector<std::string>& m, const char* meaning, KeyPath path = KeyPath::none);
  void key(const char* name, std::vector<std::string>& m, const char* meaning, const KeyWords& words);  // each of them
  void key(const char* name, Texts& m, const char* meaning);
  void key(const char* name, OptionalTexts& m, const char* meaning);
  /// A single number is a list of one; on the command line several need no brackets: 1,2.
  void key(const char* name, std::vector<int64_t>& m, const char* meaning, const std::optional<KeyRange>& range = {});
  void key(const char* name, std::vector<double>& m, const char* meaning, const std::optional<KeyRange>& range = {});
  /// Each field as one line of JSON: 0.25, "later", true, [1, 2].
  void key(const char* name, std::map<std::string, std::string>& m, const char* meaning);
  void key(const char* name, JsonText& m, const char* meaning);

 private:
  /// Adds a key; declaring a name twice is an internal error.
  void declare(ConfigKey key);

  std::vector<ConfigKey> keys_;
};

/// The keys of a struct compared with their defaults.
class KeyChanges {
 public:
  template <class T>
  explicit KeyChanges(T config) {
    T defaults;
    KeyList now, before;
    now.add(config), before.add(defaults);
    values_ = now.values(), defaults_ = before.values();
  }
  /// Whether the key's value differs from its default. Throws internal for an unknown key, as value() does.
  bool changed(const std::string& key) const {
    const std::string& now = value(key);
    return now != defaults_.at(key);
  }
  /// The key's value as YAML.
  const std::string& value(const std::string& key) const;

 private:
  std::map<std::string, std::string> values_, defaults_;
};

}  // namespace md
