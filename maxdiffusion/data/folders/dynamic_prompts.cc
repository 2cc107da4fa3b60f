#include "maxdiffusion/data/folders/dynamic_prompts.h"

#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>
#include <sstream>
#include <string_view>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {
namespace {

constexpr int kDeepest = 100;
constexpr uint64_t kMostChoices = 10000;

/// Parses a decimal number; nothing if other text follows.
std::optional<double> number_of(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty() ? std::optional(value)
                                                                                   : std::nullopt;
}

/// A whole number of at most three digits; nothing if other text follows.
std::optional<int64_t> whole_number(const std::string& text) {
  const auto value =
      text.size() > 3 || text.find_first_not_of("0123456789") != text.npos ? std::nullopt : number_of(text);
  return value ? std::optional(static_cast<int64_t>(*value)) : std::nullopt;
}

bool is_escaped(const std::string& text, size_t at) {
  return text[at] == '\\' && at + 1 < text.size() && std::string_view("{}|").find(text[at + 1]) != std::string::npos;
}

/// Whether `at` is inside a tag such as <lora:my__style__v2:1>: names in tags are those of files.
bool is_in_tag(const std::string& text, size_t at) {
  const size_t begin = text.rfind('<', at);
  if (begin == text.npos || text.find('>', begin) < at || text.find('>', at) == text.npos) return false;
  const size_t colon = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz", begin + 1);
  return colon < at && colon > begin + 1 && text[colon] == ':';
}

/// The name of the wildcard that begins at `at`; empty: there is none.
std::string wildcard_at(const std::string& text, size_t at) {
  if (text.compare(at, 2, "__") != 0 || is_in_tag(text, at)) return "";
  const size_t end = text.find("__", at + 3);
  if (end == text.npos) return "";
  const std::string name = text.substr(at + 2, end - at - 2);
  // Files may have blanks in their names.
  const bool is_name = name.find_first_of("\t\r\n,:;|{}()[]<>\"") == name.npos && name[0] != ' ' && name.back() != ' ';
  return is_name ? name : "";
}

/// The alternatives of the bracket at `at`, which is moved past it; none if the bracket does not close.
std::vector<std::string> alternatives_at(const std::string& text, size_t& at) {
  std::vector<std::string> out(1);
  int depth = 0;
  for (size_t i = at; i < text.size(); ++i) {
    if (is_escaped(text, i)) {
      out.back() += text.substr(i++, 2);
      continue;
    }
    if (text[i] == '{' && depth++ == 0) continue;
    if (text[i] == '}' && --depth == 0) {
      at = i + 1;
      return out;
    }
    if (text[i] == '|' && depth == 1)
      out.emplace_back();
    else
      out.back() += text[i];
  }
  return {};
}

}  // namespace

struct DynamicPrompts::Choice {
  const std::string& key;
  const std::string& prompt;  // used in messages
  uint64_t bits, choices = 0;

  template <class... A>
  [[noreturn]] void refuse(fmt::format_string<A...> text, A&&... args) const {
    fail(Code::invalid_config, "{}: {} in \"{}\"", key, fmt::format(text, std::forward<A>(args)...),
         shortened(prompt, 80));
  }
  /// Uniform in [0, 1).
  double next() {
    if (++choices > kMostChoices) refuse("more than {} choices; expected wildcards that do not repeat", kMostChoices);
    return std::ldexp(static_cast<double>(mix(bits ^ choices) >> 11), -53);
  }
};

bool DynamicPrompts::has_choices(const std::string& prompt) {
  for (size_t i = 0; i < prompt.size(); ++i)
    if (is_escaped(prompt, i) || prompt[i] == '{' || !wildcard_at(prompt, i).empty()) return true;
  return false;
}

std::string DynamicPrompts::chosen(const std::string& key, const std::string& prompt, uint64_t seed, int64_t image,
                                   uint64_t stream) {
  Choice choice{key, prompt, mix(mix(mix(seed) ^ static_cast<uint64_t>(image)) ^ stream)};
  return expanded(prompt, choice, 0);
}

std::string DynamicPrompts::expanded(const std::string& text, Choice& choice, int depth) {
  if (depth > kDeepest)
    choice.refuse("more than {} brackets and wildcards in each other; expected wildcards that do not name themselves",
                  kDeepest);
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (is_escaped(text, at)) {
      out += text[at + 1];
      at += 2;
    } else if (text.compare(at, 2, "${") == 0) {
      choice.refuse("'${{' begins a variable, which is not supported; expected {{a|b}}, or $\\{{ for these letters");
    } else if (text[at] == '{') {
      const std::vector<std::string> alternatives = alternatives_at(text, at);
      if (alternatives.empty()) choice.refuse("'{{' is not closed; expected {{a|b}}, or \\{{ for this letter");
      out += of_bracket(alternatives, choice, depth);
    } else if (const std::string name = only_brackets_ ? "" : wildcard_at(text, at); !name.empty()) {
      out += some_of(lines(name, choice), 1, "", choice, depth);
      at += name.size() + 4;
    } else {
      out += text[at++];
    }
  }
  return out;
}

std::string DynamicPrompts::of_bracket(std::vector<std::string> alternatives, Choice& choice, int depth) {
  const std::string mark = "$$";
  std::string& first = alternatives[0];
  const size_t end = first.find(mark);
  if (end == first.npos || first.find_first_not_of("0123456789-~@ ") != end)
    return some_of(alternatives, 1, "", choice, depth);
  const std::string range = trimmed(first.substr(0, end));
  const size_t dash = range.find('-');
  const auto least = whole_number(range.substr(0, dash)),
             most = dash == range.npos ? least : whole_number(range.substr(dash + 1));
  if (!least || !most || *least < 1 || *most < *least)
    choice.refuse("{{{}$$…}}; expected how many to choose, from 1 on, as in {{2$$a|b|c}} or {{1-2$$a|b|c}}", range);
  first.erase(0, end + mark.size());
  std::string separator = ", ";
  if (const size_t next = first.find(mark); next != first.npos) {
    separator = first.substr(0, next);
    first.erase(0, next + mark.size());
  }
  const auto numbers = static_cast<double>(*most - *least + 1);
  const int64_t extra = *most > *least ? static_cast<int64_t>(choice.next() * numbers) : 0;
  return some_of(alternatives, *least + extra, separator, choice, depth);
}

std::string DynamicPrompts::some_of(const std::vector<std::string>& alternatives, int64_t count,
                                    const std::string& separator, Choice& choice, int depth) {
  std::vector<double> weights;
  std::vector<size_t> begins;
  for (const std::string& a : alternatives) {
    const size_t colons = a.find("::");
    const auto number = colons == a.npos ? std::nullopt : number_of(trimmed(a.substr(0, colons)));
    if (number && (!std::isfinite(*number) || *number < 0))
      choice.refuse("the weight {}; expected 0 or more", a.substr(0, colons));
    weights.push_back(number.value_or(1));
    begins.push_back(number ? colons + 2 : 0);
  }
  std::string out;
  std::vector<double> left;
  for (int64_t k = 0; k < count; ++k) {
    double total = std::accumulate(left.begin(), left.end(), 0.0);
    if (!(total > 0)) {  // all are chosen
      left = weights;
      total = std::accumulate(left.begin(), left.end(), 0.0);
    }
    if (!(total > 0) || !std::isfinite(total)) choice.refuse("weights whose sum is {}; expected more than 0", total);
    double rest = choice.next() * total;
    size_t last = 0;  // the last alternative with a positive weight
    for (size_t i = 0; i < left.size(); ++i) {
      if (left[i] == 0) continue;
      last = i;
      if (rest < left[i]) break;
      rest -= left[i];
    }
    left[last] = 0;
    out += (k > 0 ? separator : "") + expanded(trimmed(alternatives[last].substr(begins[last])), choice, depth + 1);
  }
  return out;
}

const std::vector<std::string>& DynamicPrompts::lines(const std::string& name, const Choice& choice) {
  const std::string& path = files_.path(name, fmt::format("{}: __{}__", choice.key, name));
  auto [at, fresh] = lines_.try_emplace(path);
  if (fresh) {
    std::istringstream in(read_text_file(path));
    for (std::string line; std::getline(in, line);) {
      for (size_t i = line.find('#'); i != line.npos; i = line.find('#', i + 1))
        if (i == 0 || line[i - 1] == ' ' || line[i - 1] == '\t') line.resize(i);  // a comment
      if (line = trimmed(line); !line.empty()) at->second.push_back(line);
    }
  }
  check(!at->second.empty(), Code::invalid_config, "wildcards_dir: '{}' has no lines; expected one or more", path);
  return at->second;
}

}  // namespace md
