#include "maxdiffusion/base/percent_encoding.h"

#include <fmt/format.h>

#include <cctype>
#include <cstdint>

namespace md {

std::string percent_encoded(std::string_view path) {
  constexpr std::string_view kPlain = "-._~/";
  std::string out;
  for (const char c : path) {
    if (std::isalnum(static_cast<unsigned char>(c)) || kPlain.find(c) != kPlain.npos)
      out += c;
    else
      out += fmt::format("%{:02X}", static_cast<uint8_t>(c));
  }
  return out;
}

}  // namespace md
