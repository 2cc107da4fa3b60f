// Edges of an image, as OpenCV's Canny finds them with its defaults. Source: Canny 1986.
#pragma once

#include "maxdiffusion/base/host_array.h"

namespace md {

/// rgb: u8 [H, W, 3] → u8 [H, W, 3], 255 on edges, else 0. Gradients are Sobel's 3×3 of the channel where |gx| + |gy|
/// is largest; edges start above `high` and continue above `low` (hysteresis). No blur.
HostArray canny_edges(const HostArray& rgb, int low, int high);

}  // namespace md
