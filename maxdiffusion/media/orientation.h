// Orientation of stored images.
#pragma once

#include <cstdint>
#include <span>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// The orientation that a stored image declares, as EXIF numbers it: 1 upright, 3 upside down, 6 and 8 rotated by 90°,
/// 2, 4, 5 and 7 also mirrored; 1 if there is none, or it is malformed. EXIF of JPEG, PNG (eXIf, also after the pixels,
/// and the raw profiles that ImageMagick writes), WebP and TIFF, else their XMP (tiff:Orientation); AVIF's irot and
/// imir, whose EXIF does not count. Pillow's exif_transpose reads the same. Only headers are read. Thread safe.
int stored_orientation(std::span<const uint8_t> bytes);

/// u8 [H, W, 3] as stored with this orientation → upright; 5 to 8 swap the sides. An absent array stays absent.
HostArray upright(HostArray rgb, int orientation);

}  // namespace md
