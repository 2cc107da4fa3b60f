#include "maxdiffusion/media/image_size.h"

#include <fmt/format.h>

namespace md {

std::string to_string(const ImageSize& s) {
  return fmt::format("{}x{}{}", s.width, s.height, s.frames == 1 ? "" : fmt::format("x{}", s.frames));
}

}  // namespace md
