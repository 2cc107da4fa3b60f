#include "maxdiffusion/tokenizers/mojibake.h"

#include <unicode/uchar.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <vector>

#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/tokenizers/charmaps.h"

namespace md {
namespace {

using Text = std::u32string_view;

// ---- improbable adjacent characters

/// Sets of characters. Those up to kBox occur in misread UTF-8.
enum Set : uint32_t {
  kCommon = 1U << 0,  // in many contexts
  kC1 = 1U << 1,      // control characters
  kBad = 1U << 2,     // hardly ever intended
  kLaw = 1U << 3,
  kCurrency = 1U << 4,
  kOpening = 1U << 5,  // punctuation before a word
  kClosing = 1U << 6,  // punctuation after a word
  kNumeric = 1U << 7,
  kFaces = 1U << 8,          // letters of emoticons
  kUpperAccented = 1U << 9,  // Latin
  kLowerAccented = 1U << 10,
  kUpperOther = 1U << 11,  // Greek, Cyrillic
  kLowerOther = 1U << 12,
  kBox = 1U << 13,
  kLetter = 1U << 14,  // a to z, A to Z
  kSmall = 1U << 15,   // a to z
  kSpace = 1U << 16,
  kWord = 1U << 17,  // letters, digits, '_'
  kNotLetter = 1U << 18,
  kAny = 1U << 19,        // any except a line's end
  kTextStart = 1U << 20,  // not a character: the beginning of the text
};
constexpr uint32_t kAccented = kLowerAccented | kUpperAccented;

struct Members {
  Set set;
  Text characters;  // "a-z" is a range
};
constexpr Members kMembers[] = {
    {kCommon, U"\u00a0\u00ad·´–—―…’"},
    {kC1, U"\u0080-\u009f"},
    {kBad, U"¦¤¨¬¯¸ƒˆˇ˘˛˜†‡‰⌐◊\ufffdªº"},
    {kLaw, U"¶§"},
    {kCurrency, U"¢£¥₧€"},
    {kOpening, U"¡«¿©΄΅‘‚“„•‹\uf8ff"},
    {kClosing, U"®»˝”›™"},
    {kNumeric, U"²³¹±¼½¾×µ÷⁄∂∆∏∑√∞∩∫≈≠≡≤≥№"},
    {kFaces, U"Ò-ÖÙ-Üò-öø-üŐŌŪŲ°"},
    {kUpperAccented, U"À-ÑØÜÝĂĀĄĆČĎĐĘĚĒĖĞĢİĪĶĹĽŁĻŃŇŅŒŘŚŞŠŢŤŮŰŸŹŻŽҐ"},
    {kLowerAccented, U"ßà-ñăąāćčďđęěēėğģįīķĺľłļœŕśşšťüźżžґﬁﬂ"},
    {kUpperOther, U"ÞΑ-ΩΆΈΉΊΌΎΏΪΫЁ-Я"},
    {kLowerOther, U"α-ωάέήίΰа-џ"},
    {kBox, U"│┌┐┘├┤┬┼═-╬▀▄█▌▐░▒▓"},
    {kLetter, U"a-zA-Z"},
    {kSmall, U"a-z"},
};

bool contains(Text set, char32_t c) {
  for (size_t i = 0; i < set.size(); ++i) {
    const bool range = i + 2 < set.size() && set[i + 1] == '-';
    if (c >= set[i] && c <= set[range ? i + 2 : i]) return true;
    if (range) i += 2;
  }
  return false;
}

uint32_t sets_of(char32_t c) {
  uint32_t sets = 0;
  for (const Members& m : kMembers)
    if (contains(m.characters, c)) sets |= m.set;
  const auto u = static_cast<UChar32>(c);
  if (u_isUWhiteSpace(u) || (c >= 0x1C && c <= 0x1F)) sets |= kSpace;
  if ((U_MASK(u_charType(u)) & (U_GC_L_MASK | U_GC_N_MASK)) || c == '_') sets |= kWord;
  if (!(sets & kLetter)) sets |= kNotLetter;
  if (c != '\n') sets |= kAny;
  return sets;
}

/// One character of a rule: a member of these sets, or one of these characters.
struct Place {
  uint32_t sets = 0;
  Text also = {};
};
using Rule = std::initializer_list<Place>;

/// Characters after the first bytes of Arabic in Windows-1252.
constexpr Place kArabic = {kCommon | kCurrency | kBad | kNumeric | kOpening, U"ŸŠ®°µ»"};
const Rule kUnlikely[] = {
    {{kC1}},
    {{kBad | kAccented | kBox | kOpening | kClosing | kCurrency | kNumeric | kLaw}, {kBad}},
    {{kLetter}, {kLowerOther | kUpperOther}, {kBad}},
    {{kBad}, {kAccented | kBox | kOpening | kClosing | kCurrency | kNumeric | kLaw}},
    {{kLowerAccented | kLowerOther | kBox | kClosing | kCurrency | kNumeric}, {kUpperAccented}},
    {{kBox | kClosing | kCurrency | kNumeric}, {kLowerAccented}},
    {{kLowerAccented | kBox | kClosing}, {kCurrency}},
    {{kSpace}, {kUpperAccented}, {kCurrency}},
    {{kUpperAccented | kBox}, {kNumeric | kLaw}},
    {{kAccented | kBox | kCurrency | kClosing}, {kOpening}, {kNumeric}},
    {{kAccented | kCurrency | kNumeric | kBox | kLaw}, {kClosing}, {kOpening}},
    {{kCurrency | kNumeric | kBox}, {kOpening}},
    {{kSmall}, {kUpperAccented}, {kOpening | kCurrency}},
    {{kBox}, {kFaces}},
    {{kAccented | kCurrency | kNumeric | kOpening | kClosing | kLaw}, {kBox}},
    {{kBox}, {kClosing}},
    {{kAccented}, {kOpening | kClosing}, {kWord}},
    {{0, U"Œœ"}, {kNotLetter}},
    {{kUpperAccented}, {0, U"°"}},
    // Windows-1252: Latin and other letters; Arabic, at least two characters; South Asian scripts.
    {{0, U"ÂÃÎÐ"}, {kOpening | kClosing, U"€œŠš¢£Ÿž\u00a0\u00ad®©°·»–—´"}},
    {{0, U"×"}, {0, U"²³"}},
    {{0, U"ØÙ"}, kArabic, {0, U"ØÙ"}, kArabic},
    {{0, U"à"}, {0, U"²µ¹¼½¾"}},
    // Mac Roman.
    {{0, U"√"}, {0, U"±∂†≠®™´≤≥¥µø"}},
    {{0, U"≈"}, {0, U"°¢"}},
    {{0, U"‚"}, {0, U"Ä"}, {0, U"ìîïòôúùû†°¢π"}},
    {{0, U"‚"}, {0, U"âó"}, {0, U"àä°ê"}},
    // Windows-1251: punctuation; Latin-1 and Cyrillic; both misreadings combined.
    {{0, U"в"}, {0, U"Ђ"}},
    {{0, U"ВГРС"}, {kC1 | kBad | kOpening | kClosing | kCurrency, U"°µ"}, {0, U"ВГРС"}},
    {{0, U"Г"}, {0, U"ў"}, {0, U"В"}, {0, U"Ђ"}, {0, U"В"}, {kAny}, {kLetter, U" "}},
    // Windows-1252: "à", "á" and the no-break space.
    {{0, U"Ã"}, {0, U"\u00a0¡"}},
    {{kSmall}, {0, U"ÃÂ"}, {0, U" "}},
    {{kSmall}, {kSpace}, {0, U"ÃÂ"}, {0, U" "}},
    {{kTextStart}, {0, U"ÃÂ"}, {0, U" "}},
    {{kSmall | kClosing, U".,?!"}, {0, U"Â"}, {kOpening | kClosing, U" "}},
    // Windows-1253: punctuation; Latin-1 and Greek. Windows-1257: punctuation.
    {{0, U"β"}, {0, U"€"}, {0, U"™\u00a0Ά\u00ad®°"}},
    {{0, U"ΒΓΞΟ"}, {kC1 | kBad | kOpening | kClosing | kCurrency, U"°"}, {0, U"ΒΓΞΟ"}},
    {{0, U"ā"}, {0, U"€"}},
};

// ---- bytes that look like UTF-8

bool between(uint8_t b, int low, int high) { return b >= low && b <= high; }
bool is_continuation(uint8_t b) { return between(b, 0x80, 0xBF); }

/// Length in bytes of a code point with this first byte; 0: invalid.
size_t utf8_length(uint8_t lead) {
  return between(lead, 0xC2, 0xDF) ? 2 : between(lead, 0xE0, 0xEF) ? 3 : between(lead, 0xF0, 0xF4) ? 4 : 0;
}

/// Bytes from `at` on, with zeros after the end.
std::array<uint8_t, 6> peek(const std::string& bytes, size_t at) {
  std::array<uint8_t, 6> b{};
  for (size_t i = 0; i < b.size() && at + i < bytes.size(); ++i) b[i] = static_cast<uint8_t>(bytes[at + i]);
  return b;
}

/// Length of a sequence that would be UTF-8 if its only space were a no-break space; 0 if there is none.
size_t spaced_sequence(const std::array<uint8_t, 6>& b) {
  const auto inner = [](uint8_t c) { return is_continuation(c) && c != 0x85 && c != 0xA0; };
  switch (b[0]) {
    case 0xC2:
    case 0xC3:
    case 0xC5:
    case 0xCE:
    case 0xD0:
    case 0xD9: return b[1] == ' ' ? 2 : 0;
    case 0xE2:
    case 0xE3:
      if (b[1] == ' ' && inner(b[2])) return 3;
      [[fallthrough]];
    case 0xE0:
    case 0xE1: return inner(b[1]) && b[2] == ' ' ? 3 : 0;
    case 0xF0: {
      const int spaces = (b[1] == ' ') + (b[2] == ' ') + (b[3] == ' ');
      const int others = is_continuation(b[1]) + is_continuation(b[2]) + is_continuation(b[3]);
      return spaces == 1 && others == 2 ? 4 : 0;
    }
    default: return 0;
  }
}

/// Restores no-break spaces that became spaces. If "à" ends a word, its following space was lost as well and is added:
/// "Ã la" is "à la", but Portuguese "Ã quele" is "àquele" and "Ã s " is "às ".
std::string with_spaces_restored(const std::string& bytes) {
  std::string words;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const std::string_view rest = std::string_view(bytes).substr(i);
    words += bytes[i];
    if (!rest.starts_with("\xC3 ")) continue;
    const std::string_view behind = rest.substr(2);
    const auto begins = [&](const char* word) { return behind.starts_with(word); };
    if (begins(" ") || begins("quele") || begins("quela") || begins("quilo") || begins("s ")) continue;
    words += "\xA0 ";
    ++i;
  }
  std::string out;
  for (size_t i = 0; i < words.size();) {
    const size_t n = spaced_sequence(peek(words, i));
    for (const size_t end = i + std::max<size_t>(n, 1); i < end; ++i)
      out += n > 0 && words[i] == ' ' ? '\xA0' : words[i];
  }
  return out;
}

/// Length of a UTF-8 sequence, or a pair of surrogates, in which bytes are lost (0x1A, or once '?').
size_t lossy_sequence(const std::array<uint8_t, 6>& b) {
  const auto lost = [](uint8_t c) { return c == 0x1A; };
  const auto maybe = [](uint8_t c) { return c == 0x1A || c == '?'; };
  const auto continues = [](uint8_t c) { return c == 0x1A || is_continuation(c); };
  if (between(b[0], 0xC2, 0xDF) && lost(b[1])) return 2;
  if (between(b[0], 0xC2, 0xC3) && b[1] == '?') return 2;
  if (b[0] == 0xED && between(b[1], 0xA0, 0xAF) && b[3] == 0xED && between(b[4], 0xB0, 0xBF) &&
      ((maybe(b[2]) && (b[5] == '?' || continues(b[5]))) || ((b[2] == '?' || continues(b[2])) && maybe(b[5]))))
    return 6;
  if (between(b[0], 0xE0, 0xEF) && ((maybe(b[1]) && continues(b[2])) || (continues(b[1]) && maybe(b[2])))) return 3;
  if (between(b[0], 0xF0, 0xF4) &&
      ((maybe(b[1]) && continues(b[2]) && continues(b[3])) || (continues(b[1]) && maybe(b[2]) && continues(b[3])) ||
       (continues(b[1]) && continues(b[2]) && maybe(b[3]))))
    return 4;
  return lost(b[0]) ? 1 : 0;
}

std::string with_losses_marked(const std::string& bytes) {
  std::string out;
  for (size_t i = 0; i < bytes.size();) {
    const size_t n = lossy_sequence(peek(bytes, i));
    if (n > 0)
      out += "\uFFFD";
    else
      out += bytes[i];
    i += std::max<size_t>(n, 1);
  }
  return out;
}

/// Strict decoding, except that it accepts a zero in two bytes (C0 80) and pairs of surrogates in six, which some
/// programs write. None if the bytes are not UTF-8.
std::optional<std::u32string> decode_utf8(const std::string& bytes) {
  std::u32string out;
  for (size_t i = 0; i < bytes.size();) {
    const auto b = peek(bytes, i);
    const auto low = [](uint8_t c, int shift) { return static_cast<char32_t>(c & 0x3F) << shift; };
    size_t n = b[0] < 0x80 ? 1 : utf8_length(b[0]);
    if (b[0] == 0xC0 && b[1] == 0x80) {
      out += U'\0';
      n = 2;
    } else if (b[0] == 0xED && between(b[1], 0xA0, 0xAF) && is_continuation(b[2]) && b[3] == 0xED &&
               between(b[4], 0xB0, 0xBF) && is_continuation(b[5])) {
      out += static_cast<char32_t>(0x10000 + (static_cast<char32_t>(b[1] & 0xF) << 16) + low(b[2], 10) +
                                   (static_cast<char32_t>(b[4] & 0xF) << 6) + low(b[5], 0));
      n = 6;
    } else {
      const std::u32string one = to_utf32(std::string_view(bytes).substr(i, std::max<size_t>(n, 1)));
      // Invalid bytes become U+FFFD, for which only EF BF BD is valid.
      const bool replacement = b[0] == 0xEF && b[1] == 0xBF && b[2] == 0xBD;
      if (n == 0 || one.size() != 1 || (one[0] == 0xFFFD && !replacement)) return std::nullopt;
      out += one[0];
    }
    i += n;
  }
  return out;
}

// ---- decoding again

/// Whether `c` is one of these bytes in any encoding that has UTF-8's bytes at the same positions as Latin-1.
bool may_be(char32_t c, int low, int high) {
  for (size_t m = kLatin1; m <= kLastWindows; ++m)
    for (int b = low; b <= high; ++b)
      if (charmaps()[m].decode(static_cast<uint8_t>(b)) == c) return true;
  return false;
}
bool may_continue(char32_t c) { return c == ' ' || may_be(c, 0x80, 0xBF); }
/// Whether `c` may only be a continuation byte: not a character that is common in plain text, such as dashes, quotation
/// marks, bullets, ellipses.
bool continues_only(char32_t c) { return may_be(c, 0x80, 0xBF) && !contains(U"–—―‘’‚“”„•…", c); }

/// Length of the run of sequences at `at` that look like UTF-8.
size_t misread_run(Text text, size_t at) {
  if (at > 0 && continues_only(text[at - 1])) return 0;
  size_t end = at;
  for (bool again = true; again;) {
    again = false;
    const auto follows = [&](size_t count) {
      if (end + count >= text.size()) return false;
      return std::ranges::all_of(text.substr(end + 1, count), may_continue);
    };
    if (end >= text.size()) break;
    const char32_t c = text[end];
    size_t n = 0;
    if (may_be(c, 0xC2, 0xDF) && follows(1))
      n = 2;
    else if (may_be(c, 0xE0, 0xEF) && follows(2))
      n = 3;
    else if ((may_be(c, 0xF0, 0xF0) || may_be(c, 0xF3, 0xF3)) && follows(3))
      n = 4;
    end += n;
    again = n > 0;
  }
  return end - at;
}

/// Decodes each run that looks like mojibake separately.
std::u32string fix_runs(Text text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) {
    const size_t n = misread_run(text, at);
    const Text run = text.substr(at, std::max<size_t>(n, 1));
    if (n > 0 && n < text.size() && looks_misread(run))
      out += fix_encoding(std::u32string(run));
    else
      out += run;
    at += run.size();
  }
  return out;
}

std::u32string fix_once(const std::u32string& text) {
  const bool ascii = std::ranges::all_of(text, [](char32_t c) { return c < 0x80; });
  if (ascii || !looks_misread(text)) return text;
  for (size_t m = 0; m < charmaps().size(); ++m) {
    std::optional<std::string> bytes = charmaps()[m].encode(text);
    if (!bytes) continue;
    if (m != kMacRoman) bytes = with_spaces_restored(*bytes);
    if (charmaps()[m].lossy()) bytes = with_losses_marked(*bytes);
    if (std::optional<std::u32string> read = decode_utf8(*bytes)) return *read;
  }
  if (std::u32string fixed = fix_runs(text); fixed != text) return fixed;
  const auto is_c1 = [](char32_t c) { return c >= 0x80 && c <= 0x9F; };
  std::u32string fixed = text;
  for (char32_t& c : fixed)
    if (is_c1(c)) c = windows_1252(static_cast<uint8_t>(c));
  return fixed;
}

}  // namespace

bool looks_misread(Text text) {
  std::vector<uint32_t> sets(text.size());
  std::ranges::transform(text, sets.begin(), sets_of);
  const auto matches = [&](const Rule& rule, size_t at) {
    for (const Place& p : rule) {
      if (p.sets & kTextStart) {
        if (at != 0) return false;
        continue;
      }
      if (at >= text.size() || !((sets[at] & p.sets) || contains(p.also, text[at]))) return false;
      ++at;
    }
    return true;
  };
  for (size_t at = 0; at < text.size(); ++at)
    if (std::ranges::any_of(kUnlikely, [&](const Rule& rule) { return matches(rule, at); })) return true;
  return false;
}

std::u32string fix_encoding(std::u32string text) {
  for (;;) {
    std::u32string fixed = fix_once(text);
    if (fixed == text) return text;
    text = std::move(fixed);
  }
}

}  // namespace md
