#include "maxdiffusion/tokenizers/text_steps.h"

#include <unicode/normalizer2.h>
#include <unicode/regex.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/tokenizers/byte_pairs.h"
#include "maxdiffusion/tokenizers/charsmap.h"

namespace md {
namespace {

using nlohmann::json;

/// The value of a field; absent or null: the fallback.
template <class T>
T field(const json& j, const char* name, const T& fallback, const std::string& file) {
  const auto it = j.find(name);
  if (it == j.end() || it->is_null()) return fallback;
  try {
    return it->get<T>();
  } catch (const json::exception&) {
    fail(Code::io, "{}: {} is {}, in {}", file, name, it->dump(), j.dump());
  }
}

/// Byte range of a pattern's match.
struct Match {
  size_t from, to;
};
using Matcher = std::function<std::vector<Match>(std::string_view)>;

/// One match for each character for which `test` is true.
Matcher of_characters(bool (*test)(UChar32)) {
  return [test](std::string_view s) {
    std::vector<Match> out;
    for_each_code_point(s, [&](char32_t c, size_t from, size_t to) {
      if (test(static_cast<UChar32>(c))) out.push_back({from, to});
    });
    return out;
  };
}

Matcher of_text(std::string text) {
  return [text = std::move(text)](std::string_view s) {
    std::vector<Match> out;
    if (text.empty()) return out;
    for (size_t at = s.find(text); at != s.npos; at = s.find(text, at + text.size()))
      out.push_back({at, at + text.size()});
    return out;
  };
}

/// Matches of an ICU regular expression; empty matches are ignored.
Matcher of_regex(const std::string& pattern, const std::string& file) {
  UErrorCode status = U_ZERO_ERROR;
  UParseError where;
  const std::shared_ptr<const icu::RegexPattern> regex(
      icu::RegexPattern::compile(icu::UnicodeString::fromUTF8(pattern), 0, where, status));
  check(U_SUCCESS(status), Code::io, "{}: the regular expression '{}' is not understood: {} at character {}", file,
        pattern, u_errorName(status), where.offset);
  return [regex, pattern, file](std::string_view s) {
    const icu::UnicodeString text =
        icu::UnicodeString::fromUTF8(icu::StringPiece(s.data(), static_cast<int32_t>(s.size())));
    // Byte offset of each UTF-16 unit.
    std::vector<size_t> bytes(static_cast<size_t>(text.length()) + 1);
    size_t unit = 0;
    for_each_code_point(s, [&](char32_t c, size_t from, size_t to) {
      bytes[unit++] = from;
      if (c > 0xFFFF) bytes[unit++] = from;
      bytes[unit] = to;
    });
    UErrorCode status = U_ZERO_ERROR;
    const std::unique_ptr<icu::RegexMatcher> matcher(regex->matcher(text, status));
    std::vector<Match> out;
    while (U_SUCCESS(status) && matcher->find(status)) {
      const auto from = static_cast<size_t>(matcher->start(status)), to = static_cast<size_t>(matcher->end(status));
      if (to > from) out.push_back({bytes[from], bytes[to]});
    }
    check(U_SUCCESS(status), Code::io, "{}: the regular expression '{}' failed on a text of {} bytes: {}", file,
          pattern, s.size(), u_errorName(status));
    return out;
  };
}

/// "pattern": {"String": …} or {"Regex": …}, or a text.
Matcher pattern_of(const json& j, const std::string& file) {
  const json pattern = j.value("pattern", json());
  if (pattern.is_string()) return of_text(pattern);
  const bool ok = pattern.is_object() && pattern.size() == 1 && pattern.begin()->is_string();
  if (ok && pattern.contains("String")) return of_text(pattern["String"]);
  if (ok && pattern.contains("Regex")) return of_regex(pattern["Regex"], file);
  fail(Code::io, "{}: the pattern is {}; expected a String or a Regex", file, pattern.dump());
}

// --- normalizers
// ------------------------------------------------------------------------------------------------------

Normalizer unicode_form(const char* data, UNormalization2Mode mode) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* form = icu::Normalizer2::getInstance(nullptr, data, mode, status);
  check(U_SUCCESS(status), Code::internal, "ICU: {}: {}", data, u_errorName(status));
  return [form](std::string s) {
    if (is_ascii(s)) return s;
    UErrorCode status = U_ZERO_ERROR;
    const icu::StringPiece source(s.data(), static_cast<int32_t>(s.size()));
    std::string out;
    form->normalize(icu::UnicodeString::fromUTF8(source), status).toUTF8String(out);
    check(U_SUCCESS(status), Code::internal, "ICU: normalize: {}", u_errorName(status));
    return out;
  };
}

std::string lowercase(const std::string& s) {
  std::string out;
  for_each_code_point(s, [&](char32_t c, size_t, size_t) {
    append_utf8(out, static_cast<char32_t>(u_tolower(static_cast<UChar32>(c))));
    if (c == 0x130) append_utf8(out, 0x307);  // İ → i̇, the only lower case with two code points
  });
  return out;
}

std::string without_marks(std::string s) {
  std::string out;
  for_each_code_point(s, [&](char32_t c, size_t from, size_t to) {
    if (!(U_MASK(u_charType(static_cast<UChar32>(c))) & U_GC_M_MASK)) out += s.substr(from, to - from);
  });
  return out;
}

std::string strip(const std::string& s, bool left, bool right) {
  size_t begin = s.size(), end = 0;
  for_each_code_point(s, [&](char32_t c, size_t from, size_t to) {
    if (u_isUWhiteSpace(static_cast<UChar32>(c))) return;
    begin = std::min(begin, from);
    end = to;
  });
  if (!left) begin = 0;
  if (!right) end = s.size();
  return begin < end ? s.substr(begin, end - begin) : "";
}

// --- pre-tokenizers
// ---------------------------------------------------------------------------------------------------

/// How matches of a pattern are split from a text.
enum class Split { removed, isolated, merged_with_previous, merged_with_next, contiguous };

Split split_of(const std::string& name, const std::string& file) {
  constexpr std::pair<const char*, Split> kNames[] = {{"Removed", Split::removed},
                                                      {"Isolated", Split::isolated},
                                                      {"MergedWithPrevious", Split::merged_with_previous},
                                                      {"MergedWithNext", Split::merged_with_next},
                                                      {"Contiguous", Split::contiguous}};
  const auto* const known = std::ranges::find(kNames, name, [](const auto& n) { return std::string(n.first); });
  check(known != std::end(kNames), Code::io,
        "{}: behavior '{}' is not one of: Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous", file,
        name);
  return known->second;
}

/// Splits a part at the matches; with `invert` at the text between them.
void cut(const TextPart& part, const std::vector<Match>& matches, Split split, bool invert,
         std::vector<TextPart>& out) {
  struct Run {
    size_t from, to;
    bool match;
  };
  std::vector<Run> runs;
  size_t at = 0;
  for (const Match& m : matches) {
    if (m.from > at) runs.push_back({at, m.from, invert});
    runs.push_back({m.from, m.to, !invert});
    at = m.to;
  }
  if (at < part.text.size()) runs.push_back({at, part.text.size(), invert});
  std::vector<Run> normalized_runs;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& r = runs[i];
    const bool before = i > 0 && runs[i - 1].match;
    const bool joins = split == Split::merged_with_previous ? r.match && i > 0 && !before
                       : split == Split::merged_with_next   ? !r.match && before
                       : split == Split::contiguous         ? i > 0 && r.match == before
                                                            : false;
    if (joins)
      normalized_runs.back().to = r.to;
    else if (split != Split::removed || !r.match)
      normalized_runs.push_back(r);
  }
  for (const Run& r : normalized_runs)
    out.push_back({part.text.substr(r.from, r.to - r.from), part.first && r.from == 0});
}

PreTokenizer splitter(Matcher matcher, Split split, bool invert = false) {
  return [matcher = std::move(matcher), split, invert](const std::vector<TextPart>& parts) {
    std::vector<TextPart> out;
    for (const TextPart& p : parts) cut(p, matcher(p.text), split, invert, out);
    return out;
  };
}

// GPT-2's words.
constexpr const char* kByteLevelWords = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

PreTokenizer byte_level(const json& j, const std::string& file) {
  const bool prefix = field(j, "add_prefix_space", true, file);
  const PreTokenizer words = field(j, "use_regex", true, file)
                                 ? splitter(of_regex(kByteLevelWords, file), Split::isolated)
                                 : PreTokenizer([](std::vector<TextPart> p) { return p; });
  return [prefix, words](std::vector<TextPart> parts) {
    if (prefix)
      for (TextPart& p : parts)
        if (!p.text.starts_with(' ')) p.text.insert(0, " ");
    parts = words(std::move(parts));
    for (TextPart& p : parts) {
      std::string out;
      for (const char c : p.text) out += byte_letters()[static_cast<uint8_t>(c)];
      p.text = std::move(out);
    }
    return parts;
  };
}

PreTokenizer metaspace(const json& j, const std::string& file) {
  const std::string mark = field<std::string>(j, "replacement", "▁", file);
  const bool old = field(j, "add_prefix_space", true, file);
  const std::string scheme = field<std::string>(j, "prepend_scheme", old ? "always" : "never", file);
  check(scheme == "always" || scheme == "never" || scheme == "first", Code::io,
        "{}: prepend_scheme '{}' is not one of: always, never, first", file, scheme);
  const PreTokenizer words = field(j, "split", true, file) ? splitter(of_text(mark), Split::merged_with_next)
                                                           : PreTokenizer([](std::vector<TextPart> p) { return p; });
  return [mark, scheme, words](std::vector<TextPart> parts) {
    for (TextPart& p : parts) {
      std::string out;
      for (const char c : p.text) c == ' ' ? out += mark : out += c;
      if ((scheme == "always" || (scheme == "first" && p.first)) && !out.starts_with(mark)) out.insert(0, mark);
      p.text = std::move(out);
    }
    return words(std::move(parts));
  };
}

bool is_space(UChar32 c) { return u_isUWhiteSpace(c); }
bool is_number(UChar32 c) { return (U_MASK(u_charType(c)) & U_GC_N_MASK) != 0; }
bool is_punctuation(UChar32 c) {
  const bool ascii = (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) || (c >= 123 && c <= 126);
  return ascii || u_ispunct(c);
}

}  // namespace

Normalizer make_normalizer(const json& j, const std::string& file) {
  if (j.is_null()) return [](std::string s) { return s; };
  check(j.is_object(), Code::io, "{}: the normalizer is {}; expected an object", file, j.dump());
  const std::string type = field<std::string>(j, "type", "", file);
  if (type == "Sequence") {
    std::vector<Normalizer> all;
    for (const json& one : field(j, "normalizers", json::array(), file)) all.push_back(make_normalizer(one, file));
    return [all](std::string s) {
      for (const Normalizer& n : all) s = n(std::move(s));
      return s;
    };
  }
  if (type == "NFC") return unicode_form("nfc", UNORM2_COMPOSE);
  if (type == "NFD") return unicode_form("nfc", UNORM2_DECOMPOSE);
  if (type == "NFKC") return unicode_form("nfkc", UNORM2_COMPOSE);
  if (type == "NFKD") return unicode_form("nfkc", UNORM2_DECOMPOSE);
  if (type == "Lowercase") return lowercase;
  if (type == "StripAccents") return without_marks;
  if (type == "Strip")
    return [left = field(j, "strip_left", true, file),
            right = field(j, "strip_right", true, file)](const std::string& s) { return strip(s, left, right); };
  if (type == "Prepend")
    return [before = field<std::string>(j, "prepend", "", file)](const std::string& s) {
      return s.empty() ? s : before + s;
    };
  if (type == "Replace")
    return [matcher = pattern_of(j, file), by = field<std::string>(j, "content", "", file)](const std::string& s) {
      std::string out;
      size_t at = 0;
      for (const Match& m : matcher(s)) {
        out.append(s, at, m.from - at).append(by);
        at = m.to;
      }
      return out.append(s, at);
    };
  if (type == "Precompiled") {
    const auto map = std::make_shared<const Charsmap>(
        Charsmap::from_base64(field<std::string>(j, "precompiled_charsmap", "", file), file));
    return [map](const std::string& s) { return map->apply(s); };
  }
  fail(
      Code::io,
      "{}: the normalizer '{}' is not one of: Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Replace, "
      "Prepend, Precompiled",
      file, type);
}

PreTokenizer make_pre_tokenizer(const json& j, const std::string& file) {
  if (j.is_null()) return [](std::vector<TextPart> p) { return p; };
  check(j.is_object(), Code::io, "{}: the pre-tokenizer is {}; expected an object", file, j.dump());
  const std::string type = field<std::string>(j, "type", "", file);
  if (type == "Sequence") {
    std::vector<PreTokenizer> all;
    for (const json& one : field(j, "pretokenizers", json::array(), file)) all.push_back(make_pre_tokenizer(one, file));
    return [all](std::vector<TextPart> parts) {
      for (const PreTokenizer& p : all) parts = p(std::move(parts));
      return parts;
    };
  }
  if (type == "Split")
    return splitter(pattern_of(j, file), split_of(field<std::string>(j, "behavior", "", file), file),
                    field(j, "invert", false, file));
  if (type == "ByteLevel") return byte_level(j, file);
  if (type == "Metaspace") return metaspace(j, file);
  if (type == "Digits")
    return splitter(of_characters(is_number),
                    field(j, "individual_digits", false, file) ? Split::isolated : Split::contiguous);
  if (type == "Punctuation")
    return splitter(of_characters(is_punctuation), split_of(field<std::string>(j, "behavior", "Isolated", file), file));
  if (type == "WhitespaceSplit") return splitter(of_characters(is_space), Split::removed);
  if (type == "Whitespace") return splitter(of_regex(R"(\w+|[^\w\s]+)", file), Split::removed, true);
  if (type == "BertPreTokenizer")
    return [spaces = splitter(of_characters(is_space), Split::removed),
            signs = splitter(of_characters(is_punctuation), Split::isolated)](std::vector<TextPart> parts) {
      return signs(spaces(std::move(parts)));
    };
  fail(Code::io,
       "{}: the pre-tokenizer '{}' is not one of: Sequence, Split, ByteLevel, Metaspace, Digits, Punctuation, "
       "Whitespace, "
       "WhitespaceSplit, BertPreTokenizer",
       file, type);
}

}  // namespace md
