// The steps of a tokenizer.json before its model: normalizers change a text, pre-tokenizers split it into words.
// Source: the tokenizers library 0.23, normalizers/ and pre_tokenizers/; the names are those of its files.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace md {

/// UTF-8 → UTF-8. Thread safe.
using Normalizer = std::function<std::string(std::string)>;

/// A part of a text that pre-tokenizers split further.
struct TextPart {
  std::string text;
  bool first = false;  // it is at the start of the text
};
/// Thread safe.
using PreTokenizer = std::function<std::vector<TextPart>(std::vector<TextPart>)>;

/// The normalizer of a JSON value; null: the identity. Types: Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Strip,
/// StripAccents, Replace, Prepend, Precompiled. Throws io naming `file` and the type for any other, or a wrong field.
Normalizer make_normalizer(const nlohmann::json& json, const std::string& file);
/// The pre-tokenizer of a JSON value; null: one that does not split. Types: Sequence, Split, ByteLevel, Metaspace,
/// Digits, Punctuation, Whitespace, WhitespaceSplit, BertPreTokenizer. Throws io as above.
PreTokenizer make_pre_tokenizer(const nlohmann::json& json, const std::string& file);

}  // namespace md
