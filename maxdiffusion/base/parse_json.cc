#include "maxdiffusion/base/parse_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_unique_json.h"

namespace md {
namespace {

using nlohmann::json;

/// Levels of arrays and objects. Everything that people write has fewer; destructors and readers of values recurse.
constexpr int kMaxDepth = 512;

/// A value of few letters takes tens of bytes of memory. The longest that people write are headers of weights (100 MB)
/// and vocabularies.
constexpr size_t kMaxText = size_t{512} << 20;

/// The first byte beyond the limits of depth and size; npos: none.
size_t beyond_limits(std::string_view text) {
  if (text.size() > kMaxText) return kMaxText;
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\')
      ++i;
    else if (c == '"')
      quoted = !quoted;
    else if (!quoted && (c == '[' || c == '{') && ++depth > kMaxDepth)
      return i;
    else if (!quoted && (c == ']' || c == '}'))
      --depth;
  }
  return text.npos;
}

/// Python's names of NaN and infinity.
constexpr std::string_view kWords[] = {"-Infinity", "Infinity", "NaN"};
constexpr double kValues[] = {-std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()};
/// Prefix of a string that replaces one of these words.
constexpr std::string_view kEscapedMark = "\\u0001";
constexpr char kMark = '\1';

/// The text with these words replaced by strings; empty if it contains none.
std::string without_words(std::string_view text) {
  std::string out;
  bool quoted = false, found = false;
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = text.substr(i);
    if (!quoted) {
      const auto* word =
          std::find_if(std::begin(kWords), std::end(kWords), [&](auto w) { return rest.starts_with(w); });
      if (word != std::end(kWords)) {
        out.append("\"").append(kEscapedMark).append(*word).append("\"");
        i += word->size();
        found = true;
        continue;
      }
    }
    const size_t length = quoted && rest[0] == '\\' ? std::min<size_t>(2, rest.size()) : 1;
    if (rest[0] == '"') quoted = !quoted;
    out.append(rest.substr(0, length));
    i += length;
  }
  return found ? out : "";
}

bool put_back(int, json::parse_event_t event, json& value) {
  if (event != json::parse_event_t::value || !value.is_string()) return true;
  const std::string text = value;
  for (size_t i = 0; i < std::size(kWords); ++i)
    if (text == kMark + std::string(kWords[i])) value = kValues[i];
  return true;
}

void mark(json& value) {
  if (value.is_structured()) {
    for (json& member : value) mark(member);
  } else if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double v = value;
    value = kMark + std::string(kWords[std::isnan(v) ? 2 : v > 0 ? 1 : 0]);
  }
}

}  // namespace

void check_json_depth(std::string_view text) {
  const size_t at = beyond_limits(text);
  if (at == text.npos) return;
  const std::string what = at == kMaxText
                               ? fmt::format("the text has {} bytes; expected at most {}", text.size(), kMaxText)
                               : fmt::format("arrays and objects are nested more than {} levels deep", kMaxDepth);
  throw json::parse_error::create(101, at + 1, what, nullptr);
}

json parse_json(std::string_view text) {
  check_json_depth(text);
  json value = json::parse(text, nullptr, false);
  if (!value.is_discarded()) return value;
  const std::string plain = without_words(text);
  return plain.empty() ? json::parse(text) : json::parse(plain, put_back);
}

json parse_json_or_discard(std::string_view text) {
  if (beyond_limits(text) != text.npos) return json::value_t::discarded;
  json value = json::parse(text, nullptr, false);
  if (!value.is_discarded()) return value;
  const std::string plain = without_words(text);
  return plain.empty() ? value : json::parse(plain, put_back, false);
}

json parse_unique_json(std::string_view text, int depth) {
  check_json_depth(text);
  std::vector<std::set<std::string>> seen(static_cast<size_t>(depth) + 1);
  return json::parse(text, [&](int at, json::parse_event_t event, json& value) {
    if (at > depth + 1) return true;
    if (event == json::parse_event_t::object_start && at <= depth) seen[static_cast<size_t>(at)].clear();
    if (event == json::parse_event_t::key && at >= 1) {
      auto key = value.get<std::string>();
      check(seen[static_cast<size_t>(at - 1)].insert(key).second, Code::io, "'{}' is named twice", key);
    }
    return true;
  });
}

std::string dump_json(json value, int indent) {
  mark(value);
  std::string text = value.dump(indent);
  for (const std::string_view word : kWords) {
    const std::string marked = fmt::format("\"{}{}\"", kEscapedMark, word);
    for (size_t at = 0; (at = text.find(marked, at)) != text.npos; at += word.size())
      text.replace(at, marked.size(), word);
  }
  return text;
}

}  // namespace md
