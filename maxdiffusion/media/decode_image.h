// Decoding of stored images: PNG, JPEG, WebP, and the formats of FFmpeg, recognized by the first bytes, not by the
// name. Images stand upright: what a file says of its orientation (orientation.h) is applied. Thread safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/media/image_size.h"

namespace md {

/// A decoded image.
struct DecodedImage {
  HostArray rgb;    // u8 [H, W, 3]
  HostArray alpha;  // u8 [H, W, 3], alpha in all three channels; absent if the image has none
  ImageSize size;   // upright, before DecodeOptions::side
};
struct DecodeOptions {
  /// A JPEG whose sides are both at least four times this is decoded 2, 4 or 8 times smaller, to at least twice this.
  /// 0: full size.
  int64_t side = 0;
  bool alpha = false;      // true: stored colours and alpha; false: colours over white
  bool only_size = false;  // reads only the header
};
/// Throws io naming the image and the reason. An animation gives its first frame.
DecodedImage decode_stored_image(const void* data, size_t size, const std::string& name,
                                 const DecodeOptions& options = {});
/// Whether the first bytes are those of an image in one of these formats; 12 bytes suffice.
bool has_image_signature(std::string_view bytes);
/// The decoded image with its colours over white, u8 [H, W, 3].
HostArray decode_image(const std::string& file);
HostArray decode_image_bytes(const void* data, size_t size, const std::string& name, int64_t side = 0);

}  // namespace md
