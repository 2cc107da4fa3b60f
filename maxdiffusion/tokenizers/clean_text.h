// Texts from the web, mended. Sources: ftfy 6 (R. Speer), fix_text with its defaults; diffusers, prompt_clean of Wan's
// pipelines.
#pragma once

#include <string>
#include <string_view>

namespace md {

/// Line by line, until nothing changes: HTML's references that end in a semicolon become characters (unless a '<' was
/// met: then it is HTML); UTF-8 read in another encoding is read again (mojibake.h); C1 controls are Windows-1252;
/// ligatures and full- and halfwidth forms become letters, curly quotes straight, line breaks "\n"; terminal escapes
/// and control characters go; NFC. Left out of ftfy, because UTF-8 has none: surrogates. Other bytes become U+FFFD
/// first.
std::string fix_text(std::string_view text);

/// fix_text; then HTML unescaped twice as browsers do; white space collapsed to single spaces and none at the ends.
std::string clean_text(std::string_view text);

}  // namespace md
