// Base64 (RFC 4648), with padding.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace md {

std::string to_base64(std::string_view bytes);
/// Padding may be missing; text after it is ignored, and so are spaces and ends of lines, as MIME writes them. Returns
/// nothing if the text has another letter.
std::optional<std::string> from_base64(std::string_view text);

}  // namespace md
