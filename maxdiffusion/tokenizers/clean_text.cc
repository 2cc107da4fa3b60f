#include "maxdiffusion/tokenizers/clean_text.h"

#include <unicode/locid.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/tokenizers/charmaps.h"
#include "maxdiffusion/tokenizers/html_entities.h"
#include "maxdiffusion/tokenizers/mojibake.h"

namespace md {
namespace {

using Text = std::u32string_view;

constexpr size_t kLongestSegment = 1'000'000;  // characters fixed at once

icu::UnicodeString to_icu(Text text) {
  return icu::UnicodeString::fromUTF32(reinterpret_cast<const UChar32*>(text.data()),
                                       static_cast<int32_t>(text.size()));
}
std::u32string from_icu(const icu::UnicodeString& text) {
  std::u32string out;
  for (int32_t i = 0; i < text.length(); i = text.moveIndex32(i, 1)) out += static_cast<char32_t>(text.char32At(i));
  return out;
}

using Form = const icu::Normalizer2* (*)(UErrorCode&);
std::u32string normalized(Text text, Form form) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::UnicodeString out = form(status)->normalize(to_icu(text), status);
  check(U_SUCCESS(status), Code::internal, "ICU: normalization: {}", u_errorName(status));
  return from_icu(out);
}
std::u32string nfc(Text text) { return normalized(text, icu::Normalizer2::getNFCInstance); }
std::u32string nfkc(Text text) { return normalized(text, icu::Normalizer2::getNFKCInstance); }

bool is_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)) || (c >= 0x1C && c <= 0x1F); }
bool is_letter(char32_t c) { return (c | 0x20) >= 'a' && (c | 0x20) <= 'z'; }
bool is_alphanumeric(char32_t c) { return is_letter(c) || (c >= '0' && c <= '9'); }

/// The character of a reference between '&' and ';'. Also accepts names in capitals unless they mean another reference:
/// "EACUTE" is "É".
std::optional<std::u32string> reference(const std::string& name) {
  if (name.starts_with('#')) {
    std::optional<std::u32string> value = numeric_reference(to_utf32(name));
    if (!value || value->starts_with(U';')) return std::nullopt;  // the semicolon may end another reference
    return value;
  }
  if (const std::u32string* value = named_reference(name)) return *value;
  const auto is_upper = [](char c) { return c < 'a' || c > 'z'; };
  if (!std::ranges::all_of(name, is_upper)) return std::nullopt;
  std::string lower = name;
  std::ranges::transform(lower, lower.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
  const std::u32string* value = named_reference(lower);
  const std::u32string whole = to_utf32("&" + name + ";");
  if (!value || unescape_html(whole) != whole) return std::nullopt;
  return from_icu(to_icu(*value).toUpper(icu::Locale::getRoot()));
}

/// Replaces references of at most 24 letters and digits that end in a semicolon.
std::u32string unescape_certain(Text text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    if (text[at] == '&') {
      if (end < text.size() && text[end] == '#') ++end;
      const size_t first = end;
      while (end < text.size() && end - first < 24 && is_alphanumeric(text[end])) ++end;
      if (end > first && end < text.size() && text[end] == ';') {
        const auto value = reference(to_utf8(text.substr(at + 1, end - at - 1)));
        if (value) {
          out += *value;
          at = end + 1;
          continue;
        }
      }
    }
    out += text[at++];
  }
  return out;
}

/// Ligatures and digraphs of Latin letters.
constexpr std::pair<char32_t, Text> kLigatures[] = {
    {U'Ĳ', U"IJ"},  {U'ĳ', U"ij"},  {U'ŉ', U"ʼn"}, {U'Ǳ', U"DZ"}, {U'ǲ', U"Dz"}, {U'ǳ', U"dz"},
    {U'Ǆ', U"DŽ"},  {U'ǅ', U"Dž"},  {U'ǆ', U"dž"}, {U'Ǉ', U"LJ"}, {U'ǈ', U"Lj"}, {U'ǉ', U"lj"},
    {U'Ǌ', U"NJ"},  {U'ǋ', U"Nj"},  {U'ǌ', U"nj"}, {U'ﬀ', U"ff"}, {U'ﬁ', U"fi"}, {U'ﬂ', U"fl"},
    {U'ﬃ', U"ffi"}, {U'ﬄ', U"ffl"}, {U'ﬅ', U"ſt"}, {U'ﬆ', U"st"},
};

/// Maps a character; removed ones give an empty text.
std::u32string mended(char32_t c) {
  if (c >= 0x80 && c <= 0x9F) c = windows_1252(static_cast<uint8_t>(c));
  const auto* ligature = std::ranges::find(kLigatures, c, &std::pair<char32_t, Text>::first);
  if (ligature != std::end(kLigatures)) return std::u32string(ligature->second);
  if (c == 0x3000) return U" ";
  if (c >= 0xFF01 && c <= 0xFFEF) return nfkc(Text(&c, 1));
  return {c};
}

char32_t uncurled(char32_t c) {
  if (c >= 0x201C && c <= 0x201F) return '"';
  return c == 0x02BC || (c >= 0x2018 && c <= 0x201B) ? '\'' : c;
}

bool is_dropped(char32_t c) {
  return c < 0x09 || c == 0x0B || (c >= 0x0E && c < 0x20) || c == 0x7F || (c >= 0x206A && c < 0x2070) || c == 0xFEFF ||
         (c >= 0xFFF9 && c < 0xFFFD);
}

std::u32string with_plain_line_breaks(Text text) {
  std::u32string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char32_t c = text[i];
    if (c == '\r' && i + 1 < text.size() && text[i + 1] == '\n') continue;
    out += c == '\r' || c == 0x2028 || c == 0x2029 || c == 0x85 ? U'\n' : c;
  }
  return out;
}

/// Removes sequences of ESC [, digits and semicolons, and a letter.
std::u32string without_terminal_escapes(Text text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) {
    if (text.substr(at).starts_with(U"\x1B[")) {
      size_t end = at + 2;
      while (end < text.size() &&
             (text[end] == ';' || u_charType(static_cast<UChar32>(text[end])) == U_DECIMAL_DIGIT_NUMBER))
        ++end;
      if (end < text.size() && is_letter(text[end])) {
        at = end + 1;
        continue;
      }
    }
    out += text[at++];
  }
  return out;
}

std::u32string fix_segment(std::u32string text, bool html) {
  for (;;) {
    std::u32string t = fix_encoding(html ? text : unescape_certain(text)), out;
    for (char32_t c : t) out += mended(c);
    std::ranges::transform(out, out.begin(), uncurled);
    out = without_terminal_escapes(with_plain_line_breaks(out));
    std::erase_if(out, is_dropped);
    out = nfc(out);
    if (out == text) return text;
    text = std::move(out);
  }
}

std::u32string fix(Text text) {
  std::u32string out;
  bool html = false;
  while (!text.empty()) {
    const size_t line = std::min(text.find(U'\n'), text.size() - 1) + 1;
    const Text segment = text.substr(0, std::min(line, kLongestSegment));
    html |= segment.find(U'<') != Text::npos;
    out += fix_segment(std::u32string(segment), html);
    text.remove_prefix(segment.size());
  }
  return out;
}

}  // namespace

std::string fix_text(std::string_view text) { return to_utf8(fix(to_utf32(text))); }

std::string clean_text(std::string_view text) {
  const std::u32string fixed = unescape_html(unescape_html(fix(to_utf32(text))));
  std::u32string out;
  for (char32_t c : fixed)
    if (!is_space(c))
      out += c;
    else if (!out.empty() && out.back() != ' ')
      out += ' ';
  if (out.ends_with(U' ')) out.pop_back();
  return to_utf8(out);
}

}  // namespace md
