// UTF-8 that was read in another encoding ("Ã©" for "é"), detected and decoded again. Source: ftfy 6 (R. Speer),
// fix_encoding.
#pragma once

#include <string>
#include <string_view>

namespace md {

/// Whether the text has adjacent characters that are improbable except in mojibake.
bool looks_misread(std::u32string_view text);
/// Decodes again until the text is not mojibake or does not change: the whole text in the first encoding that gives
/// UTF-8, also if no-break spaces became spaces or single bytes were lost (U+FFFD); else the substrings that look like
/// UTF-8; else C1 controls as Windows-1252.
std::u32string fix_encoding(std::u32string text);

}  // namespace md
