// ASCII letters in lower case.
#pragma once

#include <algorithm>
#include <string>

namespace md {

/// `text` with A to Z as a to z; all other bytes are unchanged. Thread safe.
inline std::string lower_case(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return text;
}

}  // namespace md
