// One image or clip of a record, prepared for training: decoded, resized, cropped, mirrored. The format (PNG, JPEG or
// WebP; of clips see video/decode_video.h) is recognized by the first bytes, not by a name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/data/images/aspect_buckets.h"
#include "maxdiffusion/data/records/records.h"
#include "maxdiffusion/media/decode_image.h"

namespace md {

/// Where masks come from (masked loss): the image's alpha channel, or 1 everywhere where it has none; or the record's
/// mask.
enum class MaskFrom { none, alpha, record };

/// How frames are taken from records that are clips.
struct ClipConfig {
  int64_t frames = 17;        // where there are no buckets, which have their own
  double fps = 16;            // see FrameTimes; images of a clip are taken to have this rate
  bool random_start = false;  // anywhere in the clip, another place each time; otherwise its start
  int threads = 1;            // that decode one clip; image_batches sets it
};

struct ImageConfig {
  int64_t resolution = 512;
  bool center_crop = false, random_crop = false, random_flip = false;
  /// When given, images keep their aspect ratio, and what reaches over their bucket's size is cut off evenly on both
  /// sides, or at random with random_crop. `resolution` must be that of the buckets.
  std::optional<AspectBuckets> buckets;
  MaskFrom mask = MaskFrom::none;
  int64_t mask_downscale = 8;      // pixels of a mask's cell, in both directions; divides the images' sides
  bool sizes = false;              // see PreparedImage
  std::optional<ClipConfig> clip;  // when given, records are clips
};

/// What is random for one image: whether it is mirrored left to right, where its crop is between top (0) and bottom
/// (1), left (0) and right (1), and where a clip's frames are between its start (0) and its end (1).
struct Placement {
  bool flip = false;
  double y = 0.5, x = 0.5, time = 0;
};
/// How an image is made to fit: resized, then `size` cut out at (top, left). With center_crop or random_crop the short
/// side becomes the resolution and a square is cut out, as torchvision does; with buckets see AspectBuckets; otherwise
/// both sides become the resolution.
struct Fit {
  ImageSize resized, size;
  int64_t top = 0, left = 0;
};
Fit resize_and_crop(ImageSize image, const ImageConfig& config, const Placement& placement = {});
/// u8 [H, W, 3]: bilinear resize with antialiasing, byte for byte Pillow's; cut out, mirrored.
HostArray fit_image(const HostArray& rgb, const ImageConfig& config, const Placement& placement = {});
/// The placement from the random bits of a record, for what the config sets to random.
Placement random_placement(const ImageConfig& config, uint64_t bits);

/// The arrays of one image:
///   pixels    u8 [H, W, 3]; of a clip u8 [F, H, W, 3]
///   mask      f32 [H / mask_downscale, W / mask_downscale, 1], with ImageConfig::mask: weights in [0, 1], resized,
///             cut and mirrored as the pixels, each the mean of its cell (interpolation by area)
///   time_ids  f32 [6], with ImageConfig::sizes: original height and width, top and left of the cut in the resized
///             image (mirrored first, if it is), height and width. Source: Podell et al. 2023, section 2.2.
struct PreparedImage {
  HostArrays arrays;
  Fit fit;
};
/// Throws io where the image or its mask does not decode, or a clip has fewer frames than requested; invalid_config
/// where it has no mask or one of another size. Of a clip, one frame as stored is in memory at a time.
PreparedImage prepare_image(const Record& record, const ImageConfig& config, const Placement& placement);

}  // namespace md
