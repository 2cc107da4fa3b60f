// The only file that includes toml++.
#define TOML_EXCEPTIONS 1
// It asserts what a damaged file can break, and reports the error after that.
#define TOML_ASSERT(condition) static_cast<void>(0)
#include <toml++/toml.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/data/folders/dataset_text.h"

namespace md {
namespace {

DatasetValue of_toml(const toml::node& node, const std::string& file) {
  using Kind = DatasetValue::Kind;
  DatasetValue v;
  v.line = static_cast<int64_t>(node.source().begin.line);
  if (const auto* table = node.as_table()) {
    v.kind = Kind::table;
    for (const auto& [key, value] : *table) {
      v.members.push_back({std::string(key.str()), of_toml(value, file)});
      v.members.back().value.line = static_cast<int64_t>(key.source().begin.line);
    }
  } else if (const auto* array = node.as_array()) {
    v.kind = Kind::list;
    for (const toml::node& item : *array) v.items.push_back(of_toml(item, file));
  } else if (const auto flag = node.value_exact<bool>()) {
    v.kind = Kind::boolean, v.boolean = *flag;
  } else if (const auto whole = node.value_exact<int64_t>()) {
    v.kind = Kind::number, v.number = static_cast<double>(*whole);
  } else if (const auto number = node.value_exact<double>()) {
    v.kind = Kind::number, v.number = *number;
  } else if (const auto text = node.value_exact<std::string>()) {
    v.kind = Kind::text, v.text = *text;
  } else {
    fail(Code::invalid_config, "{}:{}: a date or time; expected a text, a number, true or false", file, v.line);
  }
  return v;
}

/// Names that dots join, as in `a.b.c = 1` and `[a.b.c]`. toml++ limits brackets, but not these, and its destructors
/// recurse.
constexpr int kMostNames = 128;
/// A value of few letters takes a hundred bytes of memory.
constexpr size_t kMostText = size_t{16} << 20;

/// Throws invalid_config for a line with more dots outside texts than names may have.
void check_dotted_names(const std::string& text, const std::string& file) {
  int64_t line = 1;
  int dots = 0;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') {
      ++line, dots = 0, quote = 0;  // a text of several lines has no names: dots in it only count within a line
    } else if (quote) {
      if (c == '\\' && quote == '"')
        ++i;
      else if (c == quote)
        quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '#') {
      while (i + 1 < text.size() && text[i + 1] != '\n') ++i;
    } else if (c == '=' || c == ',' || c == '{') {
      dots = 0;
    } else if (c == '.' && ++dots >= kMostNames) {
      fail(Code::invalid_config, "{}:{}: a key has more than {} names joined by dots; expected fewer", file, line,
           kMostNames);
    }
  }
}

}  // namespace

DatasetValue parse_toml(const std::string& text, const std::string& file) {
  check(text.size() <= kMostText, Code::invalid_config, "{}: {} bytes; expected TOML of at most {}", file, text.size(),
        kMostText);
  check_dotted_names(text, file);
  try {
    return of_toml(toml::parse(text), file);
  } catch (const toml::parse_error& e) {
    fail(Code::invalid_config, "{}:{}: expected TOML: {}", file, e.source().begin.line, e.description());
  }
}

}  // namespace md
