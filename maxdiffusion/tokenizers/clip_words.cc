#include "maxdiffusion/tokenizers/clip_words.h"

#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/utf8.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/utf8.h"

namespace md {
namespace {

enum class Kind { space, letter, number, sign };

Kind kind_of(UChar32 c) {
  if (u_isUWhiteSpace(c)) return Kind::space;
  const uint32_t mask = U_MASK(u_charType(c));
  return mask & U_GC_L_MASK ? Kind::letter : mask & U_GC_N_MASK ? Kind::number : Kind::sign;
}

// Byte length of the contraction that s starts with, or 0.
size_t contraction(std::string_view s) {
  for (std::string_view c : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (s.starts_with(c)) return c.size();
  }
  return 0;
}

}  // namespace

std::string normalize_clip_text(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  if (is_ascii(text)) {
    std::ranges::transform(text, std::back_inserter(out), [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
    return out;
  }
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(status);
  const auto source = icu::StringPiece(text.data(), static_cast<int32_t>(text.size()));
  const icu::UnicodeString composed = nfc->normalize(icu::UnicodeString::fromUTF8(source), status);
  check(U_SUCCESS(status), Code::internal, "ICU: NFC: {}", u_errorName(status));
  for (int32_t i = 0; i < composed.length(); i = composed.moveIndex32(i, 1)) {
    const UChar32 c = composed.char32At(i);
    append_utf8(out, static_cast<char32_t>(u_tolower(c)));
    if (c == 0x130) append_utf8(out, 0x307);  // İ → i̇, the only lower case with two code points
  }
  return out;
}

void split_clip_words(std::string_view s, const std::function<void(std::string_view)>& visit) {
  const auto size = static_cast<int32_t>(s.size());
  const auto peek = [&](int32_t at, int32_t& behind) {
    UChar32 c;
    behind = at;
    U8_NEXT_OR_FFFD(reinterpret_cast<const uint8_t*>(s.data()), behind, size, c);
    return kind_of(c);
  };
  const auto word = [&](int32_t from, int32_t to) {
    visit(s.substr(static_cast<size_t>(from), static_cast<size_t>(to - from)));
  };
  // End of the run of characters of one kind that starts at `at`.
  const auto run = [&](int32_t at, Kind kind) {
    for (int32_t behind; at < size && peek(at, behind) == kind;) at = behind;
    return at;
  };
  for (int32_t at = 0; at < size;) {
    const std::string_view rest = s.substr(static_cast<size_t>(at));
    // Literal special tokens that remain are split like any text, but end a run of signs at their '>'.
    for (const auto& [literal, letters] : {std::pair{"<|startoftext|>", 11}, std::pair{"<|endoftext|>", 9}}) {
      if (!rest.starts_with(literal)) continue;
      word(at, at + 2);
      word(at + 2, at + 2 + letters);
      word(at + 2 + letters, at + 4 + letters);
      at += 4 + letters;
      break;
    }
    if (at >= size) break;
    if (const auto n = static_cast<int32_t>(contraction(s.substr(static_cast<size_t>(at))))) {
      word(at, at + n);
      at += n;
      continue;
    }
    int32_t behind;
    const Kind kind = peek(at, behind);
    if (kind == Kind::letter || kind == Kind::sign) behind = run(behind, kind);
    if (kind != Kind::space) word(at, behind);
    at = behind;
  }
}

}  // namespace md
