// Inpainting on the host: masks of pixels and of latent cells, images extended beyond their sides, and generating only
// the region around a mask at a larger size. Images are u8 [H, W, 3].
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/media/resize.h"

namespace md {

/// Mask image u8 [H, W, 3] of any size → f32 [height, width], 1 where the sample is generated and 0 where the image
/// stays: resized (Lanczos) and thresholded at half grey, as diffusers' mask processor does, then grown by `grow`
/// pixels on all sides, and blurred by a Gaussian with a standard deviation of `blur` pixels, which gives values
/// between.
HostArray mask_of(const HostArray& rgb, int64_t height, int64_t width, int64_t grow = 0, double blur = 0);
/// Mask f32 [height, width] → f32 [1, h, w, 1] of cells of `downscale` pixels: each cell's first pixel, or with
/// `middle` the mean of its four central pixels; for a blurred mask the mean of all its pixels.
HostArray mask_cells(const HostArray& mask, int64_t downscale, bool middle = false);
/// Mask f32 [height, width] → f32 [1, h, w, downscale²]: of each cell all pixels, row by row.
HostArray mask_pixels(const HostArray& mask, int64_t downscale);
/// u8 images [N, H, W, 3] → f32 in [−1, 1], 0 (grey) where the mask is one half or more.
HostArray without_masked(const HostArray& images, const HostArray& mask);

/// Pixels added at each side.
struct Margins {
  int64_t left = 0, top = 0, right = 0, bottom = 0;
};
/// The image extended by the margins; its border pixels are repeated.
HostArray extended(const HostArray& image, const Margins& margins);
/// The mask extended by the margins in white. If it is absent, the part over the image is black.
HostArray extended_mask(const HostArray& mask, const HostArray& image, const Margins& margins);

/// The bounding box of the mask's pixels that are not black, extended by `pad` pixels, then in one direction to the
/// aspect ratio of width × height, within the mask. Throws invalid_config for a black mask.
Region region_around(const HostArray& mask, int64_t pad, int64_t height, int64_t width);
/// The region resized (Lanczos) to fit height × width and centred; border pixels are repeated if the aspect ratio
/// differs.
HostArray fitted(const HostArray& image, const Region& region, int64_t height, int64_t width);
/// Blends `made` over the region of the image with the mask as opacity (white: `made`). `made` is resized to the region
/// (Lanczos); its central part is used if aspect ratios differ.
HostArray put_back(const HostArray& image, const HostArray& mask, const Region& region, const HostArray& made);

}  // namespace md
