// Cleaning of text from the web. Sources: ftfy 6 (R. Speer), fix_text with its defaults; diffusers, prompt_clean of
// Wan's pipelines.
#pragma once

#include <string>
#include <string_view>

namespace md {

/// Line by line, until nothing changes: HTML references that end in a semicolon become characters (unless the text
/// contains '<'); mojibake is fixed (mojibake.h); C1 controls are Windows-1252; ligatures and full- and halfwidth forms
/// become letters, curly quotes straight, line breaks "\n"; terminal escapes and control characters are removed; NFC.
/// Invalid UTF-8 becomes U+FFFD first.
std::string fix_text(std::string_view text);

/// fix_text; then HTML unescaped twice as browsers do; white space collapsed to single spaces and stripped.
std::string clean_text(std::string_view text);

}  // namespace md
