#include "maxdiffusion/data/folders/caption_rules.h"

#include <cmath>
#include <vector>

#include "maxdiffusion/base/replaced.h"
#include "maxdiffusion/data/folders/dynamic_prompts.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {
namespace {

/// Purposes of a caption's independent random choices.
enum class Purpose : uint64_t { dropout = 1, line, wildcards, order, tags };

uint64_t bits_for(uint64_t bits, Purpose purpose) { return mix(mix(bits) ^ static_cast<uint64_t>(purpose)); }
double uniform(uint64_t bits) { return std::ldexp(static_cast<double>(bits >> 11), -53); }

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == text.npos) return parts;
    begin = end + separator.size();
  }
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (const std::string& line : split(text, "\n"))
    if (std::string t = trimmed(line); !t.empty()) lines.push_back(std::move(t));
  return lines;
}

/// Tags that stay in front, tags that may move, and tags that stay at the end.
struct Tags {
  std::vector<std::string> first, flexible, last;
};
std::vector<std::string> tags_of(const std::string& text, const std::string& separator) {
  std::vector<std::string> tags;
  for (const std::string& part : split(text, separator))
    if (std::string t = trimmed(part); !t.empty()) tags.push_back(std::move(t));
  return tags;
}
Tags split_tags(const CaptionRules& r, const std::string& text) {
  Tags t;
  if (!r.keep_separator.empty() && text.find(r.keep_separator) != text.npos) {
    const std::vector<std::string> parts = split(text, r.keep_separator);
    t.first = tags_of(parts[0], r.separator);
    t.flexible = tags_of(parts[1], r.separator);
    for (size_t i = 2; i < parts.size(); ++i)
      for (std::string& tag : tags_of(parts[i], r.separator)) t.last.push_back(std::move(tag));
    return t;
  }
  t.flexible = tags_of(text, r.separator);
  const auto retained = std::min<size_t>(static_cast<size_t>(r.keep_tokens), t.flexible.size());
  t.first.assign(t.flexible.begin(), t.flexible.begin() + static_cast<std::ptrdiff_t>(retained));
  t.flexible.erase(t.flexible.begin(), t.flexible.begin() + static_cast<std::ptrdiff_t>(retained));
  return t;
}

std::string with_trigger(const CaptionRules& r, const std::string& text) {
  if (r.trigger.empty()) return text;
  std::string out = replaced(text, "[trigger]", r.trigger);
  if (r.add_trigger && out.find(r.trigger) == out.npos) out = out.empty() ? r.trigger : r.trigger + " " + out;
  return out;
}

}  // namespace

bool drops_caption(const CaptionRules& rules, uint64_t bits) {
  return rules.dropout > 0 && uniform(bits_for(bits, Purpose::dropout)) < rules.dropout;
}

bool varies(const CaptionRules& rules, const std::string& text) {
  const auto several_lines = [&] { return lines_of(text).size() > 1; };
  return rules.shuffle || rules.tag_dropout > 0 || (rules.lines == CaptionRules::Lines::any && several_lines()) ||
         (rules.wildcards && DynamicPrompts::has_choices(rules.prefix + text + rules.suffix));
}

std::string applied(const CaptionRules& r, const std::string& text, uint64_t bits, const std::string& name) {
  std::string out = text;
  if (r.lines != CaptionRules::Lines::all) {
    const std::vector<std::string> lines = lines_of(text);
    const auto n = static_cast<double>(lines.size());
    const auto i = static_cast<size_t>(uniform(bits_for(bits, Purpose::line)) * n);
    out = lines.empty() ? "" : lines[r.lines == CaptionRules::Lines::any ? i : 0];
  }
  if (!r.prefix.empty()) out = r.prefix + " " + out;
  if (!r.suffix.empty()) out += " " + r.suffix;
  if (r.wildcards)
    out = DynamicPrompts::without_wildcards().chosen(name, replaced(replaced(out, "{{", "\\{"), "}}", "\\}"),
                                                     bits_for(bits, Purpose::wildcards), 0, 0);
  if (r.shuffle || r.tag_dropout > 0 || (!r.keep_separator.empty() && out.find(r.keep_separator) != out.npos)) {
    Tags t = split_tags(r, out);
    if (r.shuffle) {
      std::vector<std::string> shuffled;
      for (int64_t i : order_of(std::ssize(t.flexible), bits_for(bits, Purpose::order), 0, true))
        shuffled.push_back(std::move(t.flexible[static_cast<size_t>(i)]));
      t.flexible = std::move(shuffled);
    }
    uint64_t each = bits_for(bits, Purpose::tags);
    std::erase_if(t.flexible, [&](const std::string&) { return uniform(each = mix(each)) < r.tag_dropout; });
    out.clear();
    for (const auto* part : {&t.first, &t.flexible, &t.last})
      for (const std::string& tag : *part) out += (out.empty() ? "" : ", ") + tag;
  }
  if (!r.secondary_separator.empty()) out = replaced(out, r.secondary_separator, r.separator);
  return with_trigger(r, out);
}

}  // namespace md
