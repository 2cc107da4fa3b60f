// Character references of HTML: "&eacute;", "&#233;", "&#xe9;".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace md {

/// As in browsers: also references without a semicolon if HTML allows them ("&ampx" is "&x"), and numbers by HTML's
/// rules (128 is "€"). Sources: HTML standard, sections 13.2.5.72 to 80 and 13.5; Python's html.unescape.
std::u32string unescape_html(std::u32string_view text);
/// One reference of digits: "#233" or "#xe9", with or without a semicolon; none if it is not a reference.
std::optional<std::u32string> numeric_reference(std::u32string_view reference);
/// The named references that end in a semicolon, by name without it; null if unknown.
const std::u32string* named_reference(const std::string& name);

}  // namespace md
