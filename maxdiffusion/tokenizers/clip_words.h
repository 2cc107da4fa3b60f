// CLIP's pre-tokenizer: NFC, lower case, then runs of letters, single digits, runs of signs and English contractions;
// white space only separates. Same results as transformers' CLIPTokenizer (its "tokenizers" backend: code points
// lower-cased one by one, without context), except for letters that are newer than the Unicode version of the installed
// ICU (15.0 in Debian 12).
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace md {

/// NFC and lower case; bytes that are not UTF-8 become U+FFFD.
std::string normalize_clip_text(std::string_view text);
/// Calls visit for each word of normalized text, in order.
void split_clip_words(std::string_view normalized, const std::function<void(std::string_view)>& visit);

}  // namespace md
