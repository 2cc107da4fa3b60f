#include "maxdiffusion/base/shortened.h"

#include <fmt/core.h>

namespace md {

std::string shortened(std::string_view text, size_t most) {
  if (text.size() <= most) return std::string(text);
  size_t end = most;
  while (end > 0 && (text[end] & 0xC0) == 0x80) --end;  // inside a character
  return fmt::format("{}… ({} bytes)", text.substr(0, end), text.size());
}

std::string counted(int64_t n, std::string_view one) { return fmt::format("{} {}{}", n, one, n == 1 ? "" : "s"); }

}  // namespace md
