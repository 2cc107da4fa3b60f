// Single-byte encodings as which UTF-8 is read by mistake. Sources: the mapping tables of Unicode.org; Python's codecs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace md {

class Charmap {
 public:
  /// `high`: the characters of the last bytes, up to 0xFF; earlier bytes, and those that are U+FFFD here, are as in
  /// Latin-1. `lossy`: byte 0x1A is U+FFFD, the replacement character of a byte that another program could not decode.
  Charmap(std::string_view high, bool lossy);
  /// None if the encoding lacks a character of the text.
  std::optional<std::string> encode(std::u32string_view text) const;
  char32_t decode(uint8_t byte) const { return characters_[byte]; }
  bool lossy() const { return lossy_; }

 private:
  std::array<char32_t, 256> characters_;
  std::unordered_map<char32_t, char> bytes_;
  bool lossy_;
};

/// In the order of attempts: Latin-1; Windows-1252, 1251, 1250, 1253, 1254, 1257; ISO 8859-2; Mac Roman; code page 437.
const std::vector<Charmap>& charmaps();
inline constexpr size_t kLatin1 = 0, kFirstWindows = 1, kLastWindows = 6, kMacRoman = 8;  // indices
char32_t windows_1252(uint8_t byte);

}  // namespace md
