// Aspect-ratio buckets: images keep their aspect ratio and are trained at the best-fitting size of a fixed list, so
// that little is cropped and nothing is distorted; clips also at the best-fitting number of frames. Pure arithmetic.
// Source: NovelAI 2022, "Improvements on Stable Diffusion", section "Aspect ratio bucketing". List, choice and names of
// the settings are those of kohya's sd-scripts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/media/image_size.h"

namespace md {

struct AspectBucketConfig {
  int64_t resolution = 512;  // no bucket has more than resolution² pixels; see `area`
  /// Bounds of both sides. Not used with bucket_no_upscale.
  int64_t min_bucket_reso = 256, max_bucket_reso = 1024;
  int64_t bucket_reso_steps = 64;  // divides both sides
  /// Images are only downscaled: buckets follow from the images instead of a list.
  bool bucket_no_upscale = false;
  /// Numbers of frames of clips: every size comes with each of them.
  std::vector<int64_t> frames = {1};
  int64_t area = 0;  // maximum pixels of a bucket; 0: resolution²

  int64_t most_pixels() const { return area > 0 ? area : resolution * resolution; }
  /// Side of the largest square bucket.
  int64_t side() const;
};

class AspectBuckets {
 public:
  /// Throws invalid_config, naming the key.
  explicit AspectBuckets(const AspectBucketConfig& config);
  /// Buckets of these sizes. Throws invalid_config if there is none, or one is empty.
  static AspectBuckets of(std::vector<ImageSize> sizes);

  /// The largest square; and for each width from min to max, in steps, the largest height within the area and the
  /// bounds, both upright and turned on its side. Ordered by width, height and frames. Empty with bucket_no_upscale.
  const std::vector<ImageSize>& sizes() const { return sizes_; }
  const AspectBucketConfig& config() const { return config_; }

  struct Choice {
    ImageSize size;     // of the bucket
    ImageSize resized;  // size of the image before `size` is cropped from it; at least as large
  };
  /// Chooses among the buckets with the largest number of frames that the image has: the one of the image's own size,
  /// else the first whose width / height is nearest. Throws io for a clip with fewer frames than every bucket. With
  /// bucket_no_upscale the image is downscaled to at most the area, with one side a multiple of the step, and cropped
  /// to multiples of the step; throws io for an image smaller than a step.
  Choice choose(ImageSize image) const;

 private:
  AspectBuckets() = default;
  Choice choose_smaller(ImageSize image) const;
  int64_t frames_for(int64_t frames) const;
  AspectBucketConfig config_;
  std::vector<ImageSize> sizes_;
  std::vector<int64_t> frames_;
};

}  // namespace md
