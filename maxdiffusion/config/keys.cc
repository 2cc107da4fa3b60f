// Typed keys: one reader and one printer per member type, and the messages for unknown keys and invalid values.
#include <glob.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/split_at_commas.h"
#include "maxdiffusion/config/config.h"
#include "maxdiffusion/config/flow.h"

namespace md {
namespace {

using Kind = ConfigValue::Kind;

bool is_scalar(const ConfigValue& v) { return v.kind == Kind::plain || v.kind == Kind::quoted || v.kind == Kind::word; }
/// Numbers must not be quoted in YAML.
bool is_unquoted(const ConfigValue& v) { return v.kind == Kind::plain || v.kind == Kind::word; }
bool is_word(const ConfigValue& v) { return v.kind == Kind::word; }
bool is_none(const ConfigValue& v) { return is_unquoted(v) && (v.is_null || reads_as_null(v.text)); }

Error refusal(const std::string& name, const ConfigValue& v, const std::string& expected) {
  std::string found = v.is_null ? "null" : v.kind == Kind::quoted ? '"' + v.text + '"' : v.text;
  return {Code::invalid_config, fmt::format("config: {}: {} is `{}`, expected {}", v.where, name, found, expected)};
}

[[noreturn]] void wrong_type(const std::string& name, const ConfigValue& v, const std::string& expected) {
  Error error = refusal(name, v, expected);
  if (v.kind == Kind::quoted) error.note("it is quoted, which makes it text");
  // Whole numbers, such as seeds, have ranges of their own.
  const bool whole = expected.find("whole number") != std::string::npos;
  if (const auto number = read_double(v.text); number && !is_number(*number) && !whole)
    error.note(fmt::format("numbers are finite and at most {:g} in size", kLargestNumber));
  throw error;
}

/// The value as YAML. Only command-line text can be malformed here.
YAML::Node parsed(const std::string& name, const ConfigValue& v, const std::string& expected) {
  try {
    return parse_flow(v.text);
  } catch (const YAML::Exception&) {
    wrong_type(name, v, expected);
  }
}

/// Reads a list whose items `read` accepts; quoted items are passed to `read` only if `quotes`. Brackets are optional
/// on the command line.
template <class T, class Read>
std::vector<T> read_list(const std::string& name, const ConfigValue& v, const std::string& expected, bool quotes,
                         Read read) {
  if (v.kind == Kind::plain || v.kind == Kind::quoted || v.kind == Kind::mapping) wrong_type(name, v, expected);
  ConfigValue list = v;
  if (v.kind == Kind::word && !v.text.starts_with('[') && !v.text.starts_with('(')) list.text = "[" + v.text + "]";
  YAML::Node node = parsed(name, list, expected);
  if (!node.IsSequence()) wrong_type(name, v, expected);
  std::vector<T> out;
  for (const auto& item : node) {
    if (!item.IsScalar() || (is_quoted(item) && !quotes)) wrong_type(name, v, expected);
    std::optional<T> value = read(item.Scalar());
    if (!value) wrong_type(name, v, expected);
    out.push_back(*value);
  }
  return out;
}

template <class T, class Print>
std::string print_list(const std::vector<T>& list, Print print) {
  std::string out;
  for (const auto& item : list) out += (out.empty() ? "" : ", ") + print(item);
  return "[" + out + "]";
}

std::optional<std::string> read_text(const std::string& text) { return text; }

/// Expands ~ and ~/x as the shell does.
std::string with_home(const std::string& path) {
  const char* home = std::getenv("HOME");
  return home && (path == "~" || path.starts_with("~/")) ? home + path.substr(1) : path;
}

bool exists_here(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(with_home(path), ignored);
}

/// Whether a path exists, or a pattern (list_inputs in storage/storage.h) matches a file.
bool is_there(const std::string& path) {
  if (exists_here(path)) return true;
  if (path.find_first_of("*?[") == std::string::npos) return false;
  glob_t found{};
  const bool any = glob(path.substr(0, path.find("**") + 1).c_str(), GLOB_NOSORT, nullptr, &found) == 0;
  globfree(&found);
  return any;
}

bool is_relative(const std::string& path) {
  return !path.empty() && !path.starts_with('/') && path.find("://") == std::string::npos;
}

bool is_input(KeyPath path) { return path == KeyPath::input || path == KeyPath::input_or_word; }

/// Applies `f` to each comma-separated input path, which may be in `folder` or the working folder. Names that exist may
/// have commas.
template <class F>
std::string of_each(const std::string& paths, KeyPath path, const std::filesystem::path& folder, F f) {
  if (!is_input(path) || paths.find(',') == std::string::npos) return f(paths);
  std::string out;
  for (const std::string& one : split_where(paths, [&](const std::string& name) {
         return is_there(folder / with_home(name)) || is_there(with_home(name));
       }))
    out += (out.empty() ? "" : ",") + f(one);
  return out;
}

/// Resolves the paths in `text`; relative ones become relative to the working folder.
std::string placed_path(const char* name, const std::string& text, const ConfigValue& v, KeyPath path) {
  if (path == KeyPath::none) return text;
  return of_each(with_home(text), path, v.folder, [&](const std::string& one) {
    std::string expanded = with_home(one);
    if (!is_input(path) || v.folder.empty() || !is_relative(expanded)) return expanded;
    std::string in_folder = (std::filesystem::path(v.folder) / expanded).lexically_normal();
    if (is_there(in_folder)) return in_folder;
    if (!is_there(expanded)) return path == KeyPath::input ? in_folder : expanded;
    log_info("config: {}: {} '{}' is not in '{}'; the one in the working folder is used", v.where, name, expanded,
             v.folder);
    return expanded;
  });
}

Texts read_texts(const std::string& name, const ConfigValue& v, const char* expected) {
  if (v.kind == Kind::word) {
    if (std::optional<std::vector<std::string>> list = read_quoted_list(v.text)) return Texts(*list);
    if (std::optional<std::vector<std::string>> list = read_plain_list(v.text)) return Texts(*list);
  }
  if (is_scalar(v) && !v.is_null) return {v.text};
  return Texts(read_list<std::string>(name, v, expected, true, read_text));
}

/// "a finite number, 0 or more, or null".
std::string expected_number(std::string type, const std::optional<KeyRange>& range, bool or_null) {
  if (!range) return type + (or_null ? " or null" : "");
  const bool bounded = std::isfinite(range->least.value) && std::isfinite(range->most.value);
  if (type == "a number" && !bounded) type = "a finite number";
  if (const std::string text = range->text(); !text.empty()) type += ", " + text;
  return type + (or_null ? ", or null" : "");
}

/// As `read`, but rejects numbers outside the range.
template <class Read>
auto within(const std::optional<KeyRange>& range, Read read) {
  return [range, read](const std::string& text) {
    auto value = read(text);
    using Number = typename decltype(value)::value_type;
    if constexpr (std::is_arithmetic_v<Number>) {
      if (const auto on = range && range->or_switch ? read_bool(text) : std::nullopt) value = static_cast<Number>(*on);
      if (value && range && !range->contains(static_cast<double>(*value))) value.reset();
    }
    return value;
  };
}

/// Key of a number, or of an optional number.
template <class T, class Read, class Print>
ConfigKey number_key(const char* name, T& m, const char* meaning, const std::string& type,
                     const std::optional<KeyRange>& range, Read read, Print print) {
  constexpr bool optional = !std::is_arithmetic_v<T> && !std::is_same_v<T, Seed>;
  const std::string expected = expected_number(type, range, optional);
  return {.name = name,
          .meaning = meaning,
          .type = type + (optional ? " or null" : ""),
          .set =
              [=, &m, read = within(range, read)](const ConfigValue& v) {
                const auto value = is_unquoted(v) ? read(v.text) : std::nullopt;
                if (!value && !(optional && is_none(v))) wrong_type(name, v, expected);
                if constexpr (optional)
                  m = value;
                else
                  m = *value;
              },
          .print = [=, &m]() -> std::string {
            if constexpr (optional)
              return m ? print(*m) : "null";
            else
              return print(m);
          },
          .range = range};
}

template <class T, class Read, class Print>
ConfigKey numbers_key(const char* name, std::vector<T>& m, const char* meaning, const char* type,
                      const std::optional<KeyRange>& range, Read read, Print print) {
  const std::string expected = type + (range ? ", each " + range->text() : "");
  return {.name = name,
          .meaning = meaning,
          .type = type,
          .set =
              [=, &m, read = within(range, read)](const ConfigValue& v) {
                const auto one = v.kind == Kind::plain && !v.is_null ? read(v.text) : std::nullopt;
                m = one ? std::vector<T>{*one} : read_list<T>(name, v, expected, false, read);
              },
          .print = [=, &m] { return print_list(m, print); },
          .range = range};
}

/// Key of a seed, or of an optional seed. Its range is that of read_seed().
template <class T>
ConfigKey seed_key(const char* name, T& m, const char* meaning) {
  ConfigKey key = number_key(name, m, meaning, "a whole number, -1 to 18446744073709551615", {}, read_seed,
                             [](const Seed& s) { return s.text(); });
  key.type = std::is_same_v<T, Seed> ? "a whole number" : "a whole number or null";
  key.range = at_least(-1);
  return key;
}

std::string print_bool(bool b) { return b ? "true" : "false"; }
std::string print_int(int64_t i) { return std::to_string(i); }

}  // namespace

std::string ConfigKey::line() const {
  const std::string accepted = range ? range->text() : words ? words->text() : "";
  return fmt::format("{}: {}  # {}{}", name, print(), meaning, accepted.empty() ? "" : " [" + accepted + "]");
}

void KeyList::declare(ConfigKey key) {
  for (const auto& k : keys_) check(k.name != key.name, Code::internal, "config: key {} is declared twice", key.name);
  keys_.push_back(std::move(key));
}

void KeyList::key(const char* name, bool& m, const char* meaning) {
  declare({name, meaning, "true or false",
           [name, &m](const ConfigValue& v) {
             auto value = is_scalar(v) ? read_switch(v.text) : std::nullopt;
             value ? void(m = *value) : wrong_type(name, v, "true or false");
           },
           [&m] { return print_bool(m); }});
}

void KeyList::key(const char* name, int64_t& m, const char* meaning, const std::optional<KeyRange>& range) {
  declare(number_key(name, m, meaning, "a whole number", range, read_whole, print_int));
}

void KeyList::key(const char* name, Seed& m, const char* meaning) { declare(seed_key(name, m, meaning)); }
void KeyList::key(const char* name, std::optional<Seed>& m, const char* meaning) {
  declare(seed_key(name, m, meaning));
}

void KeyList::key(const char* name, double& m, const char* meaning, const std::optional<KeyRange>& range) {
  declare(number_key(name, m, meaning, "a number", range, read_number, print_double));
}

void KeyList::key(const char* name, std::string& m, const char* meaning, KeyPath path) {
  declare({name, meaning, "text",
           [name, &m, path](const ConfigValue& v) {
             if (!is_scalar(v) && !v.is_null) wrong_type(name, v, "text");
             // Python's None, which YAML reads as a text.
             const bool none = v.text == "None" && (v.kind == Kind::plain || (is_word(v) && path != KeyPath::none));
             m = v.is_null || none ? "" : placed_path(name, v.text, v, path);
           },
           [&m] { return print_string(m); }, path, [&m] { return std::vector<std::string*>{&m}; }});
}

void KeyList::key(const char* name, std::string& m, const char* meaning, const KeyWords& words) {
  key(name, m, meaning);
  ConfigKey& declared = keys_.back();
  declared.words = words;
  declared.set = [name, words, &m, any = declared.set](const ConfigValue& v) {
    any(v);
    if (m.empty() ? words.or_empty : std::ranges::count(words.words, m) > 0) return;
    Error error = refusal(name, v, words.text());
    if (const std::string near = nearest(m, words.words); !near.empty())
      error.note(fmt::format("did you mean `{}`?", near));
    throw error;
  };
}

void KeyList::key(const char* name, std::string& m, const char* meaning, Secret) {
  key(name, m, meaning);
  keys_.back().set = [name, any = keys_.back().set](const ConfigValue& v) {
    if (is_scalar(v) || v.is_null) return any(v);
    throw Error(Code::invalid_config, fmt::format("config: {}: {} is a {}, expected one text", v.where, name,
                                                  v.kind == Kind::mapping ? "mapping" : "list"))
        .note("the value is a secret and is not printed");
  };
}

void KeyList::key(const char* name, std::optional<bool>& m, const char* meaning) {
  declare({name, meaning, "true, false or null",
           [name, &m](const ConfigValue& v) {
             auto value = is_scalar(v) ? read_switch(v.text) : std::nullopt;
             if (!value && !is_none(v)) wrong_type(name, v, "true, false or null");
             m = value;
           },
           [&m] { return m ? print_bool(*m) : "null"; }});
}

void KeyList::key(const char* name, std::optional<int64_t>& m, const char* meaning,
                  const std::optional<KeyRange>& range) {
  declare(number_key(name, m, meaning, "a whole number", range, read_whole, print_int));
}

void KeyList::key(const char* name, std::optional<double>& m, const char* meaning,
                  const std::optional<KeyRange>& range) {
  declare(number_key(name, m, meaning, "a number", range, read_number, print_double));
}

void KeyList::key(const char* name, std::vector<std::string>& m, const char* meaning, KeyPath path) {
  constexpr auto kType = "a text or a list of texts, as in ['a', 'b']";
  declare({name, meaning, kType,
           [name, &m, path](const ConfigValue& v) {
             // Names of files may begin with a bracket: "[artist] a.safetensors".
             const bool named = path != KeyPath::none && is_word(v) &&
                                (exists_here(v.text) || !(v.text.ends_with(']') || v.text.ends_with(')')));
             const bool list_word = is_word(v) && !named && (v.text.starts_with('[') || v.text.starts_with('('));
             if (is_scalar(v) && !v.is_null && !list_word)
               m = {v.text};
             else
               m = read_list<std::string>(name, v, kType, true, read_text);
             for (std::string& text : m) text = placed_path(name, text, v, path);
           },
           [&m] { return print_list(m, print_string); }, path,
           [&m] {
             std::vector<std::string*> texts;
             for (std::string& text : m) texts.push_back(&text);
             return texts;
           }});
}

void KeyList::key(const char* name, std::vector<std::string>& m, const char* meaning, const KeyWords& words) {
  key(name, m, meaning);
  ConfigKey& declared = keys_.back();
  declared.words = words;
  declared.set = [name, words, &m, any = declared.set](const ConfigValue& v) {
    any(v);
    for (const std::string& text : m)
      if (text.empty() ? !words.or_empty : std::ranges::count(words.words, text) == 0)
        throw refusal(name, v, words.text());
  };
}

void KeyList::key(const char* name, Texts& m, const char* meaning) {
  constexpr auto kType = "a text or a list of texts, as in [\"a\", \"b\"]";
  declare({name, meaning, kType, [name, &m](const ConfigValue& v) { m = read_texts(name, v, kType); },
           [&m] { return print_list(m, print_string); }});
}

void KeyList::key(const char* name, OptionalTexts& m, const char* meaning) {
  constexpr auto kType = "a text, a list of texts, as in [\"a\", \"b\"], or null";
  declare({name, meaning, kType,
           [name, &m](const ConfigValue& v) {
             const bool none = v.is_null || (v.kind == Kind::word && v.text == "null");
             m = none ? OptionalTexts() : OptionalTexts(read_texts(name, v, kType));
           },
           [&m] { return print_list(m, print_string); }});
}

void KeyList::key(const char* name, std::vector<int64_t>& m, const char* meaning,
                  const std::optional<KeyRange>& range) {
  declare(numbers_key(name, m, meaning, "a list of whole numbers, as in [1, 2]", range, read_whole, print_int));
}

void KeyList::key(const char* name, std::vector<double>& m, const char* meaning, const std::optional<KeyRange>& range) {
  declare(numbers_key(name, m, meaning, "a list of numbers, as in [1.0, 2.5]", range, read_number, print_double));
}

void KeyList::key(const char* name, std::map<std::string, std::string>& m, const char* meaning) {
  constexpr auto kType = "a mapping, as in {\"a\": 1, \"b\": 2}";
  declare({name, meaning, kType,
           [name, &m](const ConfigValue& v) {
             if (v.kind != Kind::mapping && v.kind != Kind::word) wrong_type(name, v, kType);
             YAML::Node node = parsed(name, v, kType);
             if (!node.IsMap()) wrong_type(name, v, kType);
             m.clear();
             for (const auto& item : node) {
               if (!item.first.IsScalar()) wrong_type(name, v, kType);
               m[item.first.Scalar()] = print_json(item.second);
             }
           },
           [&m] {
             std::string out;
             for (const auto& [k, value] : m) out += (out.empty() ? "" : ", ") + print_string(k) + ": " + value;
             return "{" + out + "}";
           }});
}

void KeyList::key(const char* name, JsonText& m, const char* meaning) {
  declare({name, meaning, "any YAML",
           [name, &m](const ConfigValue& v) {
             m.text = is_none(v) ? "" : v.kind == Kind::quoted ? quoted(v.text) : print_json(parsed(name, v, "YAML"));
           },
           [&m] { return m.text.empty() ? "null" : m.text; }});
}

std::vector<std::string> KeyList::overrides(const std::vector<std::string>& words) const {
  std::vector<std::string> out;
  for (size_t i = 0; i < words.size(); ++i) {
    if (!words[i].starts_with("--") || words[i].size() == 2) {
      out.push_back(words[i]);
      continue;
    }
    const size_t split = words[i].find('=');
    std::string name = words[i].substr(2, split == std::string::npos ? split : split - 2);
    std::ranges::replace(name, '-', '_');
    if (split != std::string::npos) {
      out.push_back(name + words[i].substr(split));
      continue;
    }
    const auto known = std::ranges::find(keys_, name, &ConfigKey::name);
    const bool is_switch = known != keys_.end() && known->type.starts_with("true");
    const bool has_next = i + 1 < words.size() && !words[i + 1].starts_with("--");
    if (has_next && (!is_switch || read_switch(words[i + 1]) || reads_as_null(words[i + 1])))
      out.push_back(name + "=" + words[++i]);
    else if (is_switch || known == keys_.end())  // assign() reports unknown keys
      out.push_back(name + "=true");
    else
      fail(Code::invalid_config, "config: command line: {} has no value; expected {}", words[i], known->type);
  }
  return out;
}

void KeyList::assign(const ConfigSource& source, const std::map<std::string, std::string>& hints) {
  for (const auto& [name, value] : source.values()) {
    auto key = std::ranges::find(keys_, name, &ConfigKey::name);
    if (key != keys_.end()) {
      try {
        key->set(value);
      } catch (Error& e) {
        throw e.note(fmt::format("{}: {}", name, key->meaning));
      }
      continue;
    }
    Error error(Code::invalid_config, fmt::format("config: {}: there is no key `{}`", value.where, name));
    std::vector<std::string> names;
    for (const auto& k : keys_) names.push_back(k.name);
    if (const auto hint = hints.find(name); hint != hints.end())
      error.note(hint->second);
    else if (std::string near = nearest(name, names); !near.empty())
      error.note(fmt::format("did you mean `{}`?", near));
    throw error;
  }
}

void check_number(const char* name, double value) {
  check(is_number(value), Code::invalid_config, "{} is {}; expected a finite number of at most {:g} in size", name,
        value, kLargestNumber);
}

void KeyList::make_paths_absolute() {
  for (const ConfigKey& key : keys_) {
    if (key.path == KeyPath::none) continue;
    const bool or_word = key.path == KeyPath::input_or_word || key.path == KeyPath::output_or_word;
    for (std::string* text : key.paths())
      *text = of_each(*text, key.path, {}, [&](const std::string& one) {
        if (!is_relative(one) || (or_word && !is_there(one))) return one;
        return std::filesystem::absolute(one).lexically_normal().string();
      });
  }
}

std::map<std::string, std::string> KeyList::values() const {
  std::map<std::string, std::string> values;
  for (const ConfigKey& key : keys_) values[key.name] = key.print();
  return values;
}

std::string KeyList::to_yaml() const {
  std::string out;
  for (const auto& [name, value] : values()) out += name + ": " + value + "\n";
  return out;
}

const std::string& KeyChanges::value(const std::string& key) const {
  const auto found = values_.find(key);
  check(found != values_.end(), Code::internal, "config: there is no key {}", key);
  return found->second;
}

}  // namespace md
