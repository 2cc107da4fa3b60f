#include "maxdiffusion/encoders/prompt_schedule.h"

#include <cstring>
#include <optional>
#include <regex>
#include <vector>

#include "maxdiffusion/base/step_range.h"

namespace md {

/// A sequence of texts and choices.
struct PromptSchedule::Part {
  struct Item {
    std::string text;
    std::vector<Part> choices = {};      // empty: `text`
    std::optional<StepCount> when = {};  // two choices, before and after; none: they alternate
  };
  std::vector<Item> items = {};

  void add(const std::string& text) { items.push_back({text}); }
  bool changes() const {
    for (const Item& i : items)
      if (!i.choices.empty()) return true;
    return false;
  }
  void append(int64_t step, int64_t steps, std::string& out) const {
    for (const Item& i : items) {
      if (i.choices.empty())
        out += i.text;
      else if (i.when)
        i.choices[step < i.when->of(steps) ? 0 : 1].append(step, steps, out);
      else
        i.choices[static_cast<size_t>(step % steps) % i.choices.size()].append(step, steps, out);
    }
  }
};

namespace {

using Part = PromptSchedule::Part;
constexpr const char* kSpecial = "[]():|";
constexpr int kMostDepth = 200;

/// A reader of one text. Its functions return whether they could read what they are for; if not, the position is
/// undefined.
struct Reader {
  const std::string& s;
  size_t at = 0;

  char next() const { return at < s.size() ? s[at] : '\0'; }
  bool take(char c) {
    const bool found = next() == c && at < s.size();
    at += found ? 1 : 0;
    return found;
  }
  /// Text up to the next special character.
  bool plain(Part& out) {
    const size_t begin = at;
    while (at < s.size() && !std::strchr(kSpecial, s[at])) {
      if (s[at] == '\\' && (at + 1 == s.size() || s[at + 1] == '\n')) return false;
      at += s[at] == '\\' ? 2 : 1;
    }
    out.add(s.substr(begin, at - begin));
    return at > begin;
  }
  /// Texts and brackets that are closed.
  bool prompt(Part& out, int depth) {
    while (at < s.size() && !std::strchr(")]:|", s[at])) {
      const bool read = s[at] == '[' ? square(out, depth) : s[at] == '(' ? round(out, depth) : plain(out);
      if (!read) return false;
    }
    return true;
  }
  bool round(Part& out, int depth) {
    if (depth >= kMostDepth || !take('(')) return false;
    out.add("(");
    if (!prompt(out, depth + 1)) return false;
    if (take(':')) {
      out.add(":");
      if (!prompt(out, depth + 1)) return false;
    }
    out.add(")");
    return take(')');
  }
  /// "0.5]".
  std::optional<StepCount> when() {
    const size_t end = s.find(']', at);
    if (end == s.npos) return std::nullopt;
    const auto count = read_step_count(s.substr(at, end - at));
    if (count) at = end + 1;
    return count;
  }
  bool square(Part& out, int depth) {
    if (depth >= kMostDepth || !take('[')) return false;
    std::vector<Part> parts(1);
    if (!prompt(parts[0], depth + 1)) return false;
    if (take(']')) {
      out.add("[");
      for (auto& item : parts[0].items) out.items.push_back(std::move(item));
      out.add("]");
      return true;
    }
    if (next() == '|') {
      while (take('|'))
        if (!prompt(parts.emplace_back(), depth + 1)) return false;
      out.items.push_back({"", std::move(parts)});
      return take(']');
    }
    if (!take(':')) return false;
    std::optional<StepCount> count = when();
    if (count) {
      parts.insert(parts.begin(), Part());
    } else {
      if (!prompt(parts.emplace_back(), depth + 1) || !take(':')) return false;
      count = when();
    }
    out.items.push_back({"", std::move(parts), count});
    return count.has_value();
  }
  /// Also brackets and colons alone.
  bool whole(Part& out) {
    while (at < s.size()) {
      const size_t begin = at, known = out.items.size();
      if (s[at] == '|') return false;
      const bool read = s[at] == '['   ? square(out, 0)
                        : s[at] == '(' ? round(out, 0)
                                       : !std::strchr(")]:", s[at]) && plain(out);
      if (read) continue;
      if (!std::strchr("[]():", s[begin])) return false;
      out.items.resize(known);
      out.add(s.substr(begin, 1));
      at = begin + 1;
    }
    return true;
  }
};

}  // namespace

std::vector<PartOfPrompt> parts_of_prompt(const std::string& prompt) {
  static const std::regex word("\\bAND\\b"), weight("\\s*:\\s*([-+]?(?:\\d+\\.?|\\d*\\.\\d+))\\s*$");
  std::vector<PartOfPrompt> out;
  const std::sregex_token_iterator end;
  for (std::sregex_token_iterator at(prompt.begin(), prompt.end(), word, -1); at != end; ++at) out.push_back({*at});
  if (prompt.ends_with("AND") && std::regex_search(prompt, std::regex("\\bAND$"))) out.push_back({""});
  if (out.size() < 2) return {{prompt}};
  for (PartOfPrompt& part : out) {
    std::smatch m;
    if (std::regex_search(part.text, m, weight)) {
      part.weight = read_step_count(m[1])->value;
      part.text.resize(static_cast<size_t>(m.position(0)));
    }
    part.text.erase(part.text.find_last_not_of(" \t\r\n") + 1);
  }
  return out;
}

PromptSchedule::PromptSchedule(const std::string& prompt) : prompt_(prompt) {
  auto whole = std::make_unique<Part>();
  if (Reader{prompt_}.whole(*whole) && whole->changes()) whole_ = std::move(whole);
}
PromptSchedule::~PromptSchedule() = default;

bool PromptSchedule::changes() const { return whole_ != nullptr; }

std::string PromptSchedule::at(int64_t step, int64_t steps) const {
  std::string out;
  if (whole_) whole_->append(step, steps, out);
  return whole_ ? out : prompt_;
}

}  // namespace md
