#include "maxdiffusion/data/images/aspect_buckets.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

double aspect(ImageSize s) { return static_cast<double>(s.width) / static_cast<double>(s.height); }
int64_t rounded(double x) { return static_cast<int64_t>(std::floor(x + 0.5)); }

}  // namespace

int64_t AspectBucketConfig::side() const {
  return area > 0 ? static_cast<int64_t>(std::sqrt(static_cast<double>(area))) : resolution;
}

AspectBuckets AspectBuckets::of(std::vector<ImageSize> sizes) {
  check(!sizes.empty(), Code::invalid_config, "buckets: there are none");
  AspectBuckets buckets;
  for (const ImageSize& s : sizes) {
    check(s.height > 0 && s.width > 0 && s.frames > 0, Code::invalid_config,
          "buckets: {}x{} pixels, {} frames; expected all > 0", s.width, s.height, s.frames);
    buckets.frames_.push_back(s.frames);
  }
  buckets.sizes_ = std::move(sizes);
  return buckets;
}

AspectBuckets::AspectBuckets(const AspectBucketConfig& c) : config_(c), frames_(c.frames) {
  check(!c.frames.empty() && std::ranges::min(c.frames) > 0, Code::invalid_config,
        "buckets: numbers of frames must be > 0");
  const int64_t step = c.bucket_reso_steps;
  check(step > 0 && c.side() >= step, Code::invalid_config, "bucket_reso_steps is {}; expected 1 to resolution ({})",
        step, c.side());
  if (c.bucket_no_upscale) return;
  for (const auto& [key, value] :
       {std::pair{"min_bucket_reso", c.min_bucket_reso}, std::pair{"max_bucket_reso", c.max_bucket_reso}})
    check(value > 0 && value % step == 0, Code::invalid_config, "{} is {}; expected a multiple of bucket_reso_steps {}",
          key, value, step);
  check(c.min_bucket_reso <= c.side() && c.side() <= c.max_bucket_reso, Code::invalid_config,
        "resolution {} is not between min_bucket_reso {} and max_bucket_reso {}", c.side(), c.min_bucket_reso,
        c.max_bucket_reso);
  const int64_t area = c.most_pixels();
  std::set<std::pair<int64_t, int64_t>> found;  // width, height
  found.emplace(c.side() / step * step, c.side() / step * step);
  for (int64_t width = c.min_bucket_reso; width <= c.max_bucket_reso; width += step) {
    const int64_t height = std::min(c.max_bucket_reso, area / width / step * step);
    if (height < c.min_bucket_reso) break;
    found.emplace(width, height);
    found.emplace(height, width);
  }
  std::ranges::sort(frames_);
  for (const auto& [width, height] : found)
    for (int64_t frames : frames_) sizes_.push_back({height, width, frames});
}

int64_t AspectBuckets::frames_for(int64_t frames) const {
  int64_t most = 0;
  for (int64_t f : frames_)
    if (f <= frames) most = std::max(most, f);
  check(most > 0, Code::io, "{} frames; expected at least {}, as the shortest bucket of frame_buckets has", frames,
        std::ranges::min(frames_));
  return most;
}

AspectBuckets::Choice AspectBuckets::choose(ImageSize image) const {
  if (config_.bucket_no_upscale) return choose_smaller(image);
  const double image_aspect = aspect(image);
  image.frames = frames_for(image.frames);
  const auto fits = [&](const ImageSize& s) { return s.frames == image.frames; };
  ImageSize best = *std::ranges::find_if(sizes_, fits);
  for (const ImageSize& s : sizes_) {
    if (!fits(s)) continue;
    if (s == image) return {s, s};
    if (std::abs(aspect(s) - image_aspect) < std::abs(aspect(best) - image_aspect)) best = s;
  }
  const double scale = image_aspect > aspect(best)
                           ? static_cast<double>(best.height) / static_cast<double>(image.height)
                           : static_cast<double>(best.width) / static_cast<double>(image.width);
  return {best,
          {std::max(best.height, rounded(static_cast<double>(image.height) * scale)),
           std::max(best.width, rounded(static_cast<double>(image.width) * scale)), best.frames}};
}

AspectBuckets::Choice AspectBuckets::choose_smaller(ImageSize image) const {
  image.frames = frames_for(image.frames);
  const int64_t step = config_.bucket_reso_steps, area = config_.most_pixels();
  ImageSize resized = image;
  if (image.width * image.height > area) {
    // The size with that area and aspect ratio. Width or height is rounded to a multiple, whichever changes the ratio
    // less after the other side is rounded too.
    const double shape = aspect(image), width = std::sqrt(static_cast<double>(area) * shape);
    const auto multiple = [step](double x) { return rounded(x) / step * step; };
    const int64_t w = multiple(width), h = multiple(static_cast<double>(area) / width);
    const ImageSize by_width{multiple(static_cast<double>(w) / shape), w};
    const ImageSize by_height{h, multiple(static_cast<double>(h) * shape)};
    if (std::abs(aspect(by_width) - shape) < std::abs(aspect(by_height) - shape))
      resized = {rounded(static_cast<double>(w) / shape), w, image.frames};
    else
      resized = {h, rounded(static_cast<double>(h) * shape), image.frames};
  }
  const ImageSize size{resized.height / step * step, resized.width / step * step, image.frames};
  check(size.height > 0 && size.width > 0, Code::io,
        "{} pixels are smaller than bucket_reso_steps {}; bucket_no_upscale=true enlarges no image", to_string(image),
        step);
  return {size, resized};
}

}  // namespace md
