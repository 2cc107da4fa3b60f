// UTF-8 by code points.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace md {

bool is_ascii(std::string_view text);
void append_utf8(std::string& out, char32_t c);
/// Calls visit(c, from, to) for each code point, at bytes [from, to). Bytes that are not UTF-8 are visited as U+FFFD,
/// one for each maximal prefix of a code point, as Unicode recommends.
void for_each_code_point(std::string_view text, const std::function<void(char32_t c, size_t from, size_t to)>& visit);
/// The text with those bytes replaced.
std::string valid_utf8(std::string_view text);
std::u32string to_utf32(std::string_view text);
std::string to_utf8(std::u32string_view text);

}  // namespace md
