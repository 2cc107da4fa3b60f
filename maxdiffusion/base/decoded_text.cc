#include "maxdiffusion/base/decoded_text.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/utf8.h"

namespace md {
namespace {

/// Throws; `before`: the text up to the fault.
[[noreturn]] void refuse(const std::string& name, std::string_view before, const std::string& found) {
  throw Error(Code::io, fmt::format("{}:{}: {}; expected text in UTF-8, or in UTF-16 with a byte order mark", name,
                                    1 + std::ranges::count(before, '\n'), found))
      .note("try: save it as UTF-8");
}

std::string of_utf16(std::string_view bytes, bool little, const std::string& name) {
  std::string out;
  const auto unit = [&](size_t at) {
    const auto a = static_cast<uint8_t>(bytes[at]), b = static_cast<uint8_t>(bytes[at + 1]);
    return static_cast<char32_t>(little ? a | b << 8 : a << 8 | b);
  };
  const size_t end = bytes.size() / 2 * 2;
  for (size_t at = 0; at < end; at += 2) {
    char32_t c = unit(at);
    if (c >= 0xd800 && c < 0xe000) {
      const bool pair = c < 0xdc00 && at + 2 < end && unit(at + 2) >= 0xdc00 && unit(at + 2) < 0xe000;
      if (!pair) refuse(name, out, fmt::format("half a character of UTF-16, {:04X}", static_cast<uint32_t>(c)));
      at += 2;
      c = 0x10000 + ((c - 0xd800) << 10) + (unit(at) - 0xdc00);
    }
    if (c == 0) refuse(name, out, "a zero");
    append_utf8(out, c);
  }
  if (end != bytes.size()) refuse(name, out, "half a character of UTF-16 at the end");
  return out;
}

}  // namespace

std::string decoded_text(std::string_view bytes, const std::string& name) {
  if (bytes.starts_with("\xff\xfe")) return of_utf16(bytes.substr(2), true, name);
  if (bytes.starts_with("\xfe\xff")) return of_utf16(bytes.substr(2), false, name);
  if (bytes.starts_with("\xef\xbb\xbf")) bytes.remove_prefix(3);
  constexpr std::string_view kReplacement = "\xef\xbf\xbd";
  for_each_code_point(bytes, [&](char32_t c, size_t from, size_t to) {
    const std::string_view as_written = bytes.substr(from, to - from);
    if (c == 0) refuse(name, bytes.substr(0, from), "a zero byte, as in UTF-16 without a byte order mark");
    if (c == 0xfffd && as_written != kReplacement)
      refuse(name, bytes.substr(0, from),
             fmt::format("byte {:02X}, which is not UTF-8", static_cast<uint8_t>(bytes[from])));
  });
  return std::string(bytes);
}

std::string read_text_file(const std::string& path) { return decoded_text(read_file(path), path); }

}  // namespace md
