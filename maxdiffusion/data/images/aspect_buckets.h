// Aspect-ratio buckets: pictures keep their shape and are trained at the size, of a fixed list, that fits it best, so
// that little is cut off and nothing is squeezed. Pure arithmetic.
// Source: NovelAI 2022, "Improvements on Stable Diffusion", section "Aspect ratio bucketing"; list and choice as in
// kohya's sd-scripts, whose names the settings carry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

struct ImageSize {
  int64_t height = 0, width = 0;  // pixels
  bool operator==(const ImageSize&) const = default;
};
/// "768x512": width, then height.
std::string to_string(const ImageSize& size);

struct AspectBucketConfig {
  int64_t resolution = 512;  // no bucket has more than its square of pixels
  /// Bounds of both sides. They do not count with bucket_no_upscale.
  int64_t min_bucket_reso = 256, max_bucket_reso = 1024;
  int64_t bucket_reso_steps = 64;  // divides both sides
  /// Pictures are made smaller, never larger: buckets follow from the pictures instead of a list.
  bool bucket_no_upscale = false;
};

class AspectBuckets {
 public:
  /// Throws invalid_config, naming the key.
  explicit AspectBuckets(const AspectBucketConfig& config);

  /// The square of the largest side; for each width from min to max in steps the largest height that keeps the area
  /// (and the bounds), and the same lying; by width, then height. Empty with bucket_no_upscale.
  const std::vector<ImageSize>& sizes() const { return sizes_; }

  struct Choice {
    ImageSize size;     // of the bucket
    ImageSize resized;  // what the picture becomes before `size` is cut out of it: as large or larger
  };
  /// The bucket whose width / height is nearest, the first of several; one of the picture's own size before all. With
  /// bucket_no_upscale the picture at no more than the area, one side a multiple of the step, is cut to multiples of
  /// the step; throws io for a picture that is smaller than a step.
  Choice choose(ImageSize picture) const;

 private:
  Choice choose_smaller(ImageSize picture) const;
  AspectBucketConfig config_;
  std::vector<ImageSize> sizes_;
};

}  // namespace md
