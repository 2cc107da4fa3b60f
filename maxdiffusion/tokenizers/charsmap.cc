#include "maxdiffusion/tokenizers/charsmap.h"

#include <unicode/brkiter.h>
#include <unicode/utext.h>

#include <cstring>
#include <memory>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/utf8.h"

namespace md {
namespace {

constexpr size_t kLongGrapheme = 6;  // bytes

/// Calls visit for each extended grapheme cluster.
void for_each_grapheme(std::string_view text, const std::function<void(std::string_view)>& visit) {
  UErrorCode status = U_ZERO_ERROR;
  // Creating an iterator reads its rules; copying one is cheap.
  static const std::unique_ptr<const icu::BreakIterator> graphemes(
      icu::BreakIterator::createCharacterInstance(icu::Locale::getRoot(), status));
  check(U_SUCCESS(status) && graphemes, Code::internal, "ICU: graphemes: {}", u_errorName(status));
  const std::unique_ptr<icu::BreakIterator> it(graphemes->clone());
  const std::unique_ptr<UText, UText* (*)(UText*)> open(
      utext_openUTF8(nullptr, text.data(), static_cast<int64_t>(text.size()), &status), utext_close);
  it->setText(open.get(), status);
  check(U_SUCCESS(status), Code::internal, "ICU: graphemes: {}", u_errorName(status));
  for (int32_t from = it->first(), to = it->next(); to != icu::BreakIterator::DONE; from = to, to = it->next())
    visit(text.substr(static_cast<size_t>(from), static_cast<size_t>(to - from)));
}

}  // namespace

Charsmap::Charsmap(std::string_view bytes, const std::string& file) {
  if (bytes.empty()) return;
  uint32_t size = 0;
  if (bytes.size() >= sizeof size) std::memcpy(&size, bytes.data(), sizeof size);
  check(size > 0 && size % sizeof(uint32_t) == 0 && size <= bytes.size() - sizeof size, Code::io,
        "{}: the table of text normalization is damaged: {} bytes that announce a trie of {}", file, bytes.size(),
        size);
  trie_.resize(size / sizeof(uint32_t));
  std::memcpy(trie_.data(), bytes.data() + sizeof size, size);
  values_ = bytes.substr(sizeof size + size);
}

std::optional<std::string_view> Charsmap::find(std::string_view part) const {
  const auto offset = [](uint32_t unit) { return (unit >> 10) << ((unit & (1U << 9)) >> 6); };
  size_t node = offset(trie_[0]);
  for (const char c : part) {
    const auto label = static_cast<uint8_t>(c);
    node ^= label;
    if (label == 0 || node >= trie_.size() || (trie_[node] & ((1U << 31) | 0xFF)) != label) return std::nullopt;
    const uint32_t unit = trie_[node];
    node ^= offset(unit);
    if (!((unit >> 8) & 1)) continue;
    const size_t at = node < trie_.size() ? trie_[node] & ((1U << 31) - 1) : values_.size();
    if (at >= values_.size()) return std::nullopt;
    return std::string_view(values_).substr(at, values_.find('\0', at) - at);
  }
  return std::nullopt;
}

Charsmap Charsmap::from_base64(std::string_view text, const std::string& file) {
  std::optional<std::string> bytes = md::from_base64(text);
  check(bytes.has_value(), Code::io, "{}: precompiled_charsmap is not base64", file);
  return {std::move(*bytes), file};
}

std::string Charsmap::apply(std::string_view text) const {
  if (trie_.empty()) return std::string(text);
  std::string out;
  out.reserve(text.size());
  for_each_grapheme(text, [&](std::string_view grapheme) {
    if (grapheme.size() < kLongGrapheme)
      if (const auto value = find(grapheme)) {
        out += *value;
        return;
      }
    for_each_code_point(grapheme, [&](char32_t, size_t from, size_t to) {
      const std::string_view part = grapheme.substr(from, to - from);
      out += find(part).value_or(part);
    });
  });
  return out;
}

}  // namespace md
