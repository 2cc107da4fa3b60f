#include "maxdiffusion/base/nearest.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

namespace md {
namespace {

/// Edit distance; a swap of adjacent letters counts as one edit.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& known) {
  const auto small = [](std::string s) {
    std::ranges::transform(s, s.begin(), [](unsigned char c) { return std::tolower(c); });
    return s;
  };
  // At most a third of the letters may differ.
  size_t best = std::max<size_t>(1, word.size() / 3) + 1;
  std::string found;
  for (const auto& k : known) {
    if (std::max(word.size(), k.size()) - std::min(word.size(), k.size()) >= best) continue;  // so many edits at least
    size_t distance = edit_distance(small(word), small(k));
    if (distance < best && distance < std::max(word.size(), k.size())) best = distance, found = k;
  }
  return found;
}

std::string nearest_first(const std::string& word, const std::vector<std::string>& known) {
  std::vector<std::string> all = known;
  const auto at = std::ranges::find(all, nearest(word, known));
  if (at != all.end()) std::rotate(all.begin(), at, at + 1);
  return fmt::format("{}", fmt::join(all, ", "));
}

}  // namespace md
