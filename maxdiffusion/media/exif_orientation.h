// Orientation of stored images.
#pragma once

#include <cstdint>
#include <span>

namespace md {

/// EXIF orientation in a JPEG file's bytes: 1 upright, 3 upside down, 6 and 8 rotated by 90°, the others also mirrored;
/// 1 if there is none, and for other formats. Decoding applies it.
int exif_orientation(std::span<const uint8_t> bytes);

}  // namespace md
