// One image or clip of a record, prepared for training: decoded, resized, cropped, mirrored. The format (PNG, JPEG or
// WebP; of clips see media/decode_video.h) is recognized by the first bytes, not by a name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/data/folders/caption_rules.h"
#include "maxdiffusion/data/images/aspect_buckets.h"
#include "maxdiffusion/data/records/records.h"
#include "maxdiffusion/media/decode_image.h"

namespace md {

/// Source of masks (masked loss). `alpha`: the image's alpha channel, or 1 everywhere if it has none. `record`: the
/// record's mask. `whole`: 1 everywhere.
enum class MaskFrom { none, alpha, record, whole };

/// How frames are sampled from records that are clips.
struct ClipConfig {
  int64_t frames = 17;        // without buckets, which have their own
  double fps = 16;            // see FrameTimes; images of a clip are assumed to have this rate
  bool random_start = false;  // start at a random time, another one at each use; otherwise at `start`
  double start = 0;           // from 0, the clip's first frame, to 1, as late as the frames fit
  int threads = 1;            // threads that decode one clip; image_batches sets it
};

struct ImageConfig {
  int64_t resolution = 512;
  bool center_crop = false, random_crop = false, random_flip = false;
  /// If set, images keep their aspect ratio, and the part beyond their bucket's size is cropped, evenly on both sides
  /// or at random with random_crop. `resolution` must be that of the buckets.
  std::optional<AspectBuckets> buckets;
  MaskFrom mask = MaskFrom::none;
  int64_t mask_downscale = 8;      // pixels of a mask's cell in both directions; divides the images' sides
  bool sizes = false;              // see PreparedImage
  int64_t references = 0;          // see PreparedImage
  std::optional<ClipConfig> clip;  // if set, records are clips
  double unmasked_weight = 0;      // lower bound of a mask's weights, before loss_weight
  double loss_weight = 1;          // factor of a mask's weights
  /// Limits: images with fewer pixels, a shorter side, or an aspect ratio (width / height) outside are skipped. 0: no
  /// limit.
  int64_t least_area = 0, least_side = 0;
  double least_aspect = 0, greatest_aspect = 0;
  CaptionRules captions;
  /// The configs of a data set's folders, by number, for their records. This config holds what they share: masks,
  /// sizes, references, clips, and whether any folder mirrors or crops at random.
  std::vector<ImageConfig> folders;

  const ImageConfig& of_folder(int64_t folder) const {
    return folders.empty() ? *this : folders.at(static_cast<size_t>(folder));
  }
  /// Whether images have different sizes.
  bool several_sizes() const { return buckets.has_value() || !folders.empty(); }
};
/// The record's caption after the rules, with these random bits; "" if they drop it.
std::string caption_of(const Record& record, const ImageConfig& config, uint64_t bits);

/// The random choices for one image. `flip`: mirrored left to right. `y`, `x`: position of the crop from top (0) to
/// bottom (1), and from left (0) to right (1). `time`: position of a clip's frames from its start (0) to its end (1).
struct Placement {
  bool flip = false;
  double y = 0.5, x = 0.5, time = 0;
};
/// Resize and crop of an image: it is resized to `resized`, then `size` is cropped at (top, left). With center_crop or
/// random_crop the shorter side becomes the resolution and a square is cropped, as in torchvision; for buckets see
/// AspectBuckets; otherwise both sides become the resolution.
struct Fit {
  ImageSize resized, size;
  int64_t top = 0, left = 0;
};
Fit resize_and_crop(ImageSize image, const ImageConfig& config, const Placement& placement = {});
/// u8 [H, W, 3]: bilinear resize with antialiasing, byte for byte Pillow's; then crop and flip.
HostArray fit_image(const HostArray& rgb, const ImageConfig& config, const Placement& placement = {});
/// The placement from a record's random bits; only what the config sets to random differs from the default.
Placement random_placement(const ImageConfig& config, uint64_t bits);

/// The arrays of one image:
///   pixels    u8 [H, W, 3]; of a clip u8 [F, H, W, 3]
///   mask      f32 [H / mask_downscale, W / mask_downscale, 1], with ImageConfig::mask: weights in [0, 1], resized,
///             cropped and mirrored as the pixels, each the mean of its cell (interpolation by area)
///   reference_image_0, …  u8 [H, W, 3], with ImageConfig::references: one of the image's size is resized, cropped and
///             mirrored as the image; of another size, its shorter side is resized to fit and the center is cropped
///   time_ids  f32 [6], with ImageConfig::sizes: original height and width, top and left of the crop in the resized
///             image (after mirroring, if any), height and width. Source: Podell et al. 2023, section 2.2.
struct PreparedImage {
  HostArrays arrays;
  Fit fit;
};
/// Throws io if the image or its mask does not decode, or a clip has fewer frames than requested; invalid_config if the
/// mask is missing or has another size than the image. A clip's stored frames are decoded one at a time to save memory.
PreparedImage prepare_image(const Record& record, const ImageConfig& config, const Placement& placement);

}  // namespace md
