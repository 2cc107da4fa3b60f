#include "maxdiffusion/base/utf8.h"

#include <unicode/utf8.h>

#include <algorithm>

namespace md {

bool is_ascii(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

void append_utf8(std::string& out, char32_t c) {
  char bytes[U8_MAX_LENGTH];
  int32_t n = 0;
  U8_APPEND_UNSAFE(bytes, n, c);
  out.append(bytes, static_cast<size_t>(n));
}

void for_each_code_point(std::string_view text, const std::function<void(char32_t, size_t, size_t)>& visit) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  const auto size = static_cast<int64_t>(text.size());
  for (int64_t at = 0; at < size;) {
    const int64_t from = at;
    UChar32 c;
    U8_NEXT_OR_FFFD(bytes, at, size, c);
    visit(static_cast<char32_t>(c), static_cast<size_t>(from), static_cast<size_t>(at));
  }
}

std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for_each_code_point(text, [&](char32_t c, size_t, size_t) { append_utf8(out, c); });
  return out;
}

std::u32string to_utf32(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for_each_code_point(text, [&](char32_t c, size_t, size_t) { out += c; });
  return out;
}

std::string to_utf8(std::u32string_view text) {
  std::string out;
  out.reserve(text.size());
  for (char32_t c : text) append_utf8(out, c);
  return out;
}

}  // namespace md
