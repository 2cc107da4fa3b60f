// Preprocessing of images for image encoders, by preprocessor_config.json. Source: transformers, CLIPImageProcessor
// (the one that works with Pillow).
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
  ImageSize crop = {224, 224};    // centre crop; smaller images are padded with black
  bool do_resize = true, do_center_crop = true, do_rescale = true, do_normalize = true;
  Filter filter = Filter::bicubic;
  double rescale_factor = 1.0 / 255;
  std::array<double, 3> mean = {0.48145466, 0.4578275, 0.40821073}, std = {0.26862954, 0.26130258, 0.27577711};

  /// Reads these fields by transformers' names; absent ones keep their defaults. Throws invalid_config.
  static ImageProcessor from_json(const nlohmann::json& config);
  /// rgb: u8 [H, W, 3] → f32 [height, width, 3] of the crop: (value · rescale_factor − mean) / std, for each channel.
  HostArray apply(const HostArray& rgb) const;
};

}  // namespace md
