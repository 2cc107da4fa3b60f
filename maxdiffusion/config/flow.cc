#include "maxdiffusion/config/flow.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/base/lower_case.h"
#include "maxdiffusion/base/parse_json.h"

namespace md {
namespace {

/// Python's tuples as lists: parentheses outside quotes become brackets.
std::string brackets_for_parentheses(std::string text) {
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    char& c = text[i];
    if (quote) {
      if (c == '\\' && quote == '"')
        ++i;
      else if (c == quote)
        quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '(') {
      c = '[';
    } else if (c == ')') {
      c = ']';
    }
  }
  return text;
}

std::string_view without_spaces_before(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(" \t\n"), text.size()));
}

/// Removes one quoted text from the front of `rest`; none if there is none.
std::optional<std::string> parse_quoted(std::string_view& rest) {
  if (rest.empty() || (rest[0] != '"' && rest[0] != '\'')) return std::nullopt;
  const char quote = rest[0];
  std::string letters;
  for (size_t i = 1; i < rest.size(); ++i) {
    const bool pair = i + 1 < rest.size() && (quote == '"' ? rest[i] == '\\' : rest.substr(i, 2) == "''");
    if (pair) {
      letters += quote == '"' ? rest.substr(i, 2) : "'";
      ++i;
    } else if (rest[i] != quote) {
      letters += rest[i];
    } else {
      rest.remove_prefix(i + 1);
      if (quote == '\'') return letters;
      const nlohmann::json text = parse_json_or_discard('"' + letters + '"');
      return text.is_string() ? std::optional(text.get<std::string>()) : std::nullopt;
    }
  }
  return std::nullopt;
}

/// Whether the text has no character with a special meaning in YAML. Rejects texts that start like a number: some
/// readers parse hexadecimal, base-60 and date forms as numbers.
bool is_bare_word(const std::string& text) {
  if (text.empty() || (!std::isalpha(static_cast<unsigned char>(text[0])) && text[0] != '/')) return false;
  return std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '/' || c == '.' || c == '-' || c == '+';
  });
}

/// Lists and mappings in one line; `word` prints an unquoted scalar.
template <class Word>
std::string print(const YAML::Node& node, Word word) {
  std::string out;
  switch (node.Type()) {
    case YAML::NodeType::Scalar: return is_quoted(node) ? md::quoted(node.Scalar()) : word(node.Scalar());
    case YAML::NodeType::Sequence:
      for (const auto& item : node) out += (out.empty() ? "" : ", ") + print(item, word);
      return "[" + out + "]";
    case YAML::NodeType::Map:
      for (const auto& item : node) {
        std::string key = item.first.IsScalar() ? item.first.Scalar() : print(item.first, word);
        out += (out.empty() ? "" : ", ") + md::quoted(key) + ": " + print(item.second, word);
      }
      return "{" + out + "}";
    default: return "null";
  }
}

}  // namespace

YAML::Node parse_flow(const std::string& text) {
  bool starts_list = !text.empty() && (text.front() == '(' || text.front() == '[' || text.front() == '{');
  return load_yaml(starts_list ? brackets_for_parentheses(text) : text);
}

bool is_quoted(const YAML::Node& scalar) { return scalar.Tag() == "!"; }

std::optional<std::vector<std::string>> read_quoted_list(std::string_view text) {
  std::string_view rest = without_spaces_before(text);
  if (!rest.starts_with('[') && !rest.starts_with('(')) return std::nullopt;
  const bool tuple = rest[0] == '(';
  std::vector<std::string> out;
  bool comma = true;  // before the next item
  for (rest = without_spaces_before(rest.substr(1)); !rest.starts_with(tuple ? ')' : ']');
       rest = without_spaces_before(rest)) {
    std::optional<std::string> member = comma ? parse_quoted(rest) : std::nullopt;
    if (!member) return std::nullopt;
    out.push_back(std::move(*member));
    rest = without_spaces_before(rest);
    comma = rest.starts_with(',');
    if (comma) rest.remove_prefix(1);
  }
  if (tuple && out.size() == 1 && !comma) return std::nullopt;  // in Python, too, ("a") is a text and not a tuple
  if (!without_spaces_before(rest.substr(1)).empty()) return std::nullopt;
  return out;
}

std::optional<std::vector<std::string>> read_plain_list(const std::string& text) {
  if (!text.starts_with('[') || !text.ends_with(']')) return std::nullopt;
  std::vector<std::string> out;
  try {
    const YAML::Node node = load_yaml(text + "\n...");
    if (!node.IsSequence() || node.size() < 2) return std::nullopt;
    for (const auto& item : node) {
      if (!item.IsScalar()) return std::nullopt;
      out.push_back(item.Scalar());
    }
  } catch (const YAML::Exception&) {
    return std::nullopt;
  }
  return out;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\')
      out += fmt::format("\\{}", static_cast<char>(c));
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (c < 0x20 || c == 0x7f)
      out += fmt::format("\\u{:04x}", c);
    else
      out += static_cast<char>(c);
  }
  return out + "\"";
}

std::string print_string(const std::string& text) {
  bool has_meaning =
      read_double(text) || read_bool(text) || reads_as_null(text) || lower_case(text) == "y" || lower_case(text) == "n";
  return is_bare_word(text) && !has_meaning ? text : md::quoted(text);
}

std::string print_json(const YAML::Node& node) {
  return print(node, [](const std::string& text) -> std::string {
    if (text == "None") return "null";
    if (auto value = read_bool(text)) return *value ? "true" : "false";
    if (auto value = read_int(text)) return std::to_string(*value);
    if (auto value = read_double(text); value && std::isfinite(*value)) return print_double(*value);
    return md::quoted(text);
  });
}

std::string print_flow(const YAML::Node& node) {
  return print(node, [](const std::string& text) {
    bool typed = read_bool(text) || read_double(text) || text == "None";
    return typed ? text : md::quoted(text);
  });
}

std::optional<bool> read_bool(const std::string& text) {
  std::string t = lower_case(text);
  if (t == "true" || t == "yes" || t == "on") return true;
  if (t == "false" || t == "no" || t == "off") return false;
  return std::nullopt;
}

std::optional<int64_t> read_int(const std::string& text) {
  std::string t = text;
  if (!t.empty() && t.front() == '+') t.erase(0, 1);
  if (t.empty() || t.front() == '_' || t.back() == '_' || t.front() == '+') return std::nullopt;
  std::erase(t, '_');
  int64_t value = 0;
  auto [end, error] = std::from_chars(t.data(), t.data() + t.size(), value);
  if (error != std::errc() || end != t.data() + t.size()) return std::nullopt;
  return value;
}

std::optional<double> read_double(const std::string& text) {
  std::string t = lower_case(text);
  double sign = 1;
  if (!t.empty() && (t.front() == '+' || t.front() == '-')) {
    sign = t.front() == '-' ? -1 : 1;
    t.erase(0, 1);
  }
  if (t == "inf" || t == ".inf") return sign * std::numeric_limits<double>::infinity();
  if (t == "nan" || t == ".nan") return std::numeric_limits<double>::quiet_NaN();
  if (t.empty() || (!std::isdigit(static_cast<unsigned char>(t[0])) && t[0] != '.')) return std::nullopt;
  if (t.back() != '_') std::erase(t, '_');
  double value = 0;
  auto [end, error] = std::from_chars(t.data(), t.data() + t.size(), value);
  if (error != std::errc() || end != t.data() + t.size()) return std::nullopt;
  return sign * value;
}

std::optional<double> read_number(const std::string& text) {
  const std::optional<double> value = read_double(text);
  return value && is_number(*value) ? value : std::nullopt;
}

std::optional<bool> read_switch(const std::string& text) {
  if (text == "1" || text == "0") return text == "1";
  return read_bool(text);
}

std::optional<int64_t> read_whole(const std::string& text) {
  if (const std::optional<int64_t> value = read_int(text)) return value;
  constexpr double kExact = 9007199254740992;  // 2⁵³
  const std::optional<double> value = read_double(text);
  if (!value || !(std::abs(*value) <= kExact) || *value != std::trunc(*value)) return std::nullopt;
  return static_cast<int64_t>(*value);
}

std::optional<Seed> read_seed(const std::string& text) {
  if (const std::optional<int64_t> value = read_whole(text))
    return *value >= -1 ? std::optional(Seed(*value)) : std::nullopt;
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(Seed(value)) : std::nullopt;
}

std::string print_double(double d) {
  std::string text = fmt::format("{}", d);
  if (text == "inf" || text == "-inf") return text == "inf" ? ".inf" : "-.inf";
  if (text == "nan" || text == "-nan") return ".nan";
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

bool reads_as_null(const std::string& text) {
  std::string t = lower_case(text);
  return t.empty() || t == "~" || t == "null" || t == "none";
}

}  // namespace md
