// The size of an image or a clip, in pixels and frames.
#pragma once

#include <cstdint>
#include <string>

namespace md {

struct ImageSize {
  int64_t height = 0, width = 0;  // pixels
  int64_t frames = 1;             // of a clip
  bool operator==(const ImageSize&) const = default;
};
/// "768x512", or of a clip "768x512x17": width, height, frames.
std::string to_string(const ImageSize& size);

}  // namespace md
