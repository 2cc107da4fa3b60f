// Pictures of records, made ready for training: decoded, resized, cropped, mirrored; all at once or batch by batch.
// Formats (PNG, JPEG, WebP) are told by the first bytes, not by a name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/data/images/aspect_buckets.h"
#include "maxdiffusion/data/records/records.h"

namespace md {

/// Where the weights of a picture's parts come from (masked loss): its alpha channel, 1 where it has none, or the
/// record's mask.
enum class MaskFrom { none, alpha, record };

struct ImageConfig {
  int64_t resolution = 512;
  bool center_crop = false, random_crop = false, random_flip = false;
  /// Given: `resolution` is theirs, pictures keep their shape, and what reaches over a bucket's size is cut off evenly,
  /// or anywhere with random_crop.
  std::optional<AspectBuckets> buckets;
  MaskFrom mask = MaskFrom::none;
  int64_t mask_downscale = 8;  // pixels of a mask's cell, in both directions; divides the pictures' sides
  bool sizes = false;          // see PreparedImage
};

/// A decoded picture.
struct DecodedImage {
  HostArray rgb;    // u8 [H, W, 3]
  HostArray alpha;  // the same for alpha, in all three channels; absent where the picture has none
  ImageSize size;   // upright, before a JPEG comes smaller
};
struct DecodeOptions {
  /// A JPEG whose sides are all at least four times this comes smaller, by 2, 4 or 8, but at least twice this. 0: no.
  int64_t side = 0;
  bool alpha = false;      // colours as they are stored, and alpha apart; otherwise colours over white, and no alpha
  bool only_size = false;  // from the header; no pixels
};
/// Throws io naming the picture and the reason.
DecodedImage decode_stored_image(const void* data, size_t size, const std::string& name,
                                 const DecodeOptions& options = {});
/// Colours over white, u8 [H, W, 3].
HostArray decode_image(const std::string& file);
HostArray decode_image_bytes(const void* data, size_t size, const std::string& name, int64_t side = 0);

/// What is drawn for one picture: mirrored left to right; where a crop lies between the first place (0) and the last
/// (1).
struct Placement {
  bool flip = false;
  double y = 0.5, x = 0.5;
};
/// What becomes of a picture: resized, then `size` cut out at (top, left). With center_crop or random_crop the short
/// side becomes the resolution and a square is cut out, as torchvision does; with buckets see AspectBuckets; otherwise
/// both sides become the resolution.
struct Fit {
  ImageSize resized, size;
  int64_t top = 0, left = 0;
};
Fit fit_of(ImageSize picture, const ImageConfig& config, const Placement& placement = {});
/// u8 [H, W, 3]: bilinear resize with antialiasing, byte for byte Pillow's; cut out, mirrored.
HostArray fit_image(const HostArray& rgb, const ImageConfig& config, const Placement& placement = {});
/// From the random bits of a record, for the options that draw.
Placement draw_placement(const ImageConfig& config, uint64_t bits);

/// A picture of a record, ready for training, and what is told of it:
///   pixels    u8 [H, W, 3]
///   mask      f32 [H / mask_downscale, W / mask_downscale, 1], with ImageConfig::mask: weights in [0, 1], resized,
///             cut and mirrored as the pixels, each the mean of its cell (interpolation by area)
///   time_ids  f32 [6], with ImageConfig::sizes: original height and width, top and left of the cut in the resized
///             picture (mirrored first, if it is), height and width. Source: Podell et al. 2023, section 2.2.
struct PreparedImage {
  HostArrays arrays;
  Fit fit;
};
/// Throws io where the picture or its mask does not decode, invalid_config where it has no mask or one of another size.
PreparedImage prepare_image(const Record& record, const ImageConfig& config, const Placement& placement);

}  // namespace md
