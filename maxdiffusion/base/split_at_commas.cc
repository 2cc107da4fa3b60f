#include "maxdiffusion/base/split_at_commas.h"

#include "maxdiffusion/base/files.h"

#include <algorithm>

namespace md {

std::vector<std::string> split_at_commas(const std::vector<std::string>& texts) {
  if (texts.size() > 1) return texts;
  if (texts.empty()) return texts;
  return split_where(texts[0], [](const std::string&) { return false; });
}

std::vector<std::string> split_where(const std::string& text, const std::function<bool(const std::string&)>& is_one) {
  const auto trimmed = [&](size_t begin, size_t end) {
    const std::string part = text.substr(begin, end - begin);
    const size_t first = part.find_first_not_of(' ');
    return first == part.npos ? "" : part.substr(first, part.find_last_not_of(' ') + 1 - first);
  };
  std::vector<std::string> out;
  for (size_t begin = 0; begin <= text.size();) {
    size_t end = text.size();
    const size_t shortest = std::min(text.find(',', begin), end);
    while (end > shortest && !is_one(trimmed(begin, end))) end = text.rfind(',', end - 1);
    if (const std::string part = trimmed(begin, end); !part.empty()) out.push_back(part);
    begin = end + 1;
  }
  return out;
}

std::vector<std::string> split_paths(const std::vector<std::string>& texts) {
  if (texts.size() != 1) return texts;
  return split_where(texts[0], [](const std::string& path) { return exists(path); });
}

}  // namespace md
