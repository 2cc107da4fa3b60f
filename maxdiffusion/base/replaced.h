// Replacing parts of a text.
#pragma once

#include <string>

namespace md {

/// `text` with every `from`, which is not empty, replaced by `to`.
inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

}  // namespace md
