// Resizing of 8-bit images with Pillow's algorithm: a filter widened by the scale when shrinking (antialiasing),
// columns first, fixed point. Results equal Pillow's byte for byte.
#pragma once

#include <cstdint>

#include "maxdiffusion/base/host_array.h"

namespace md {

enum class Filter { bilinear, bicubic, lanczos };  // Pillow's Image.BILINEAR, Image.BICUBIC and Image.LANCZOS

/// A rectangle of an image: [x, x + width) × [y, y + height).
struct Region {
  int64_t x = 0, y = 0, width = 0, height = 0;
};

/// rgb: u8 [H, W, 3] → u8 [height, width, 3].
HostArray resize_rgb8(const HostArray& rgb, int64_t height, int64_t width, Filter filter = Filter::bilinear);
/// The pixels of `part` in resize_rgb8(rgb, height, width, filter); other pixels are not computed. Throws internal if
/// the part is not inside that image.
HostArray resize_rgb8(const HostArray& rgb, int64_t height, int64_t width, const Region& part, Filter filter);
/// The rectangle [y, y+height) × [x, x+width). Throws internal if it is not inside the image.
HostArray crop_rgb8(const HostArray& rgb, int64_t y, int64_t x, int64_t height, int64_t width);
/// Flips left to right.
HostArray flip_rgb8(const HostArray& rgb);

}  // namespace md
