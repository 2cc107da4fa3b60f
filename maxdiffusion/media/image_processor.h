// Preprocessing of images for image encoders, by preprocessor_config.json. Source: transformers, CLIPImageProcessor and
// Qwen2VLImageProcessor (those that work with Pillow).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <array>
#include <optional>
#include <string>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/media/image_size.h"
#include "maxdiffusion/media/resize.h"

namespace md {

struct ImageProcessor {
  int64_t shortest_edge = 224;    // pixels of the shorter side after resizing, if `size` is absent
  std::optional<ImageSize> size;  // after resizing
  /// Bounds for images of any size: after resizing, sides are multiples of `multiple`, and the number of pixels is
  /// between `least` and `most`.
  struct Area {
    int64_t multiple = 28, least = int64_t{56} * 56, most = int64_t{28} * 28 * 1280;
  };
  std::optional<Area> area;
  ImageSize crop = {224, 224};  // centre crop; smaller images are padded with black
  bool do_resize = true, do_center_crop = true, do_rescale = true, do_normalize = true;
  Filter filter = Filter::bicubic;
  double rescale_factor = 1.0 / 255;
  std::array<double, 3> mean = {0.48145466, 0.4578275, 0.40821073}, std = {0.26862954, 0.26130258, 0.27577711};

  /// Reads these fields by transformers' names; absent ones keep their defaults. If `merge_size` is present, sets
  /// `area`, with bounds from `size` or from `min_pixels` and `max_pixels`. Throws invalid_config.
  static ImageProcessor from_json(const nlohmann::json& config);
  /// Size of an image after resizing. With `area`, throws invalid_config if one side is more than 200 times the other.
  ImageSize resized(const ImageSize& image) const;
  /// rgb: u8 [H, W, 3] → f32 [height, width, 3] of the crop: (value · rescale_factor − mean) / std, for each channel.
  HostArray apply(const HostArray& rgb) const;
};

}  // namespace md
