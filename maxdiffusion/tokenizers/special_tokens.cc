#include "maxdiffusion/tokenizers/special_tokens.h"

#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>

namespace md {
namespace {

/// Start of the white space before `at`, at least `from`.
size_t space_before(std::string_view s, size_t from, size_t at) {
  auto i = static_cast<int32_t>(at);
  const auto least = static_cast<int32_t>(from);
  while (i > least) {
    int32_t before = i;
    UChar32 c;
    U8_PREV_OR_FFFD(reinterpret_cast<const uint8_t*>(s.data()), least, before, c);
    if (!u_isUWhiteSpace(c)) break;
    i = before;
  }
  return static_cast<size_t>(i);
}

/// End of the white space after `at`.
size_t space_behind(std::string_view s, size_t at) {
  auto i = static_cast<int64_t>(at);
  while (i < static_cast<int64_t>(s.size())) {
    int64_t behind = i;
    UChar32 c;
    U8_NEXT_OR_FFFD(reinterpret_cast<const uint8_t*>(s.data()), behind, static_cast<int64_t>(s.size()), c);
    if (!u_isUWhiteSpace(c)) break;
    i = behind;
  }
  return static_cast<size_t>(i);
}

}  // namespace

SpecialTokens::SpecialTokens(std::vector<SpecialToken> tokens) : tokens_(std::move(tokens)) {
  std::ranges::stable_sort(tokens_,
                           [](const SpecialToken& a, const SpecialToken& b) { return a.text.size() > b.text.size(); });
}

void SpecialTokens::cut(std::string_view s, bool normalized, const std::function<void(std::string_view)>& text,
                        const std::function<void(int32_t)>& special) const {
  std::string first;  // first bytes of all tokens
  for (const SpecialToken& t : tokens_)
    if (t.normalized == normalized && first.find(t.text[0]) == first.npos) first += t.text[0];
  size_t from = 0;
  for (size_t at = s.find_first_of(first); at != s.npos; at = s.find_first_of(first, at)) {
    const auto hit = std::ranges::find_if(
        tokens_, [&](const SpecialToken& t) { return t.normalized == normalized && s.substr(at).starts_with(t.text); });
    if (hit == tokens_.end()) {
      ++at;
      continue;
    }
    const size_t begin = hit->strips_left ? space_before(s, from, at) : at;
    at += hit->text.size();
    if (begin > from) text(s.substr(from, begin - from));
    special(hit->id);
    from = at = hit->strips_right ? space_behind(s, at) : at;
  }
  if (from < s.size()) text(s.substr(from));
}

}  // namespace md
