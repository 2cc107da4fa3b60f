// Aspect-ratio buckets: images keep their shape and are trained at the size, of a fixed list, that fits it best, so
// that little is cut off and nothing is squeezed; clips also at the number of frames that fits. Pure arithmetic.
// Source: NovelAI 2022, "Improvements on Stable Diffusion", section "Aspect ratio bucketing"; list and choice as in
// kohya's sd-scripts, whose names the settings carry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/media/image_size.h"

namespace md {

struct AspectBucketConfig {
  int64_t resolution = 512;  // no bucket has more than resolution² pixels
  /// Bounds of both sides. Not used with bucket_no_upscale.
  int64_t min_bucket_reso = 256, max_bucket_reso = 1024;
  int64_t bucket_reso_steps = 64;  // divides both sides
  /// Images are made smaller, never larger: buckets follow from the images instead of a list.
  bool bucket_no_upscale = false;
  /// Numbers of frames of clips: every size comes with each of them.
  std::vector<int64_t> frames = {1};
};

class AspectBuckets {
 public:
  /// Throws invalid_config, naming the key.
  explicit AspectBuckets(const AspectBucketConfig& config);
  /// These sizes. Throws invalid_config where there is none, or one is empty.
  static AspectBuckets of(std::vector<ImageSize> sizes);

  /// The largest square; and for each width from min to max, in steps, the largest height within the area and the
  /// bounds, both upright and turned on its side. Ordered by width, height and frames. Empty with bucket_no_upscale.
  const std::vector<ImageSize>& sizes() const { return sizes_; }

  struct Choice {
    ImageSize size;     // of the bucket
    ImageSize resized;  // what the image becomes before `size` is cut out of it: as large or larger
  };
  /// Of the buckets with the most frames that the image has: that of its own size, else the first of those whose width
  /// / height is nearest. Throws io for a clip with fewer frames than all. With bucket_no_upscale the image is scaled
  /// down to at most the area, with one side a multiple of the step, and cut to multiples of the step; throws io for an
  /// image that is smaller than a step.
  Choice choose(ImageSize image) const;

 private:
  AspectBuckets() = default;
  Choice choose_smaller(ImageSize image) const;
  int64_t frames_for(int64_t frames) const;
  AspectBucketConfig config_;
  std::vector<ImageSize> sizes_;
  std::vector<int64_t> frames_;
};

/// Throws invalid_config unless `value` is `first` plus a multiple of `step`, naming the key and the nearest values
/// that are: sides that a model does not divide, numbers of frames.
void check_multiple(const std::string& key, int64_t value, int64_t step, int64_t first = 0);

}  // namespace md
