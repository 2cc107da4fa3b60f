// Functions shared by preparing, loading and batching images; for files of data/ only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "maxdiffusion/data/images/prepare.h"

namespace md {

/// Throws invalid_config for a resolution below 1, two kinds of crop, or masks of clips.
void check_image_config(const ImageConfig& config);

/// The image of a record, decoded large enough for `config`. Throws io for a record without one. For a clip only the
/// size is returned, with the number of its frames at the requested rate.
DecodedImage decode_record(const Record& record, const ImageConfig& config, bool only_size = false);

/// resize_and_crop, naming the record in its error.
Fit resize_and_crop_of_record(const Record& record, ImageSize size, const ImageConfig& config,
                              const Placement& placement);

/// Left edge of the crop in the mirrored image.
int64_t mirrored_left(const Fit& fit);

/// By width, height and frames, as AspectBuckets orders its sizes.
struct SizeOrder {
  bool operator()(const ImageSize& a, const ImageSize& b) const {
    return std::tuple(a.width, a.height, a.frames) < std::tuple(b.width, b.height, b.frames);
  }
};

/// Size of pixels u8 [H, W, 3], with `clip` [F, H, W, 3]; more leading axes are allowed.
inline ImageSize size_of_pixels(const HostArray& pixels, bool clip) {
  const auto end = pixels.dims().end();
  return {end[-3], end[-2], clip ? end[-4] : 1};
}

/// One record of a batch.
struct ImageRow {
  HostArrays arrays;
  std::string caption, name;
  std::string fault;  // why the record cannot be used, or empty
};

/// Stacks the arrays of all rows along a new axis 0. Rows are emptied one by one, so that memory holds little more than
/// one copy at any time. Throws io naming a row whose arrays differ in names or shapes from the first.
HostArrays stack_rows(std::vector<ImageRow>& rows);

/// Logs "read n of m images" at most every five seconds. Thread safe.
class ReadingProgress {
 public:
  explicit ReadingProgress(int64_t total) : total_(total) {}  // −1: not known
  void step();

 private:
  const int64_t total_;
  std::atomic<int64_t> done_ = 0;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace md
