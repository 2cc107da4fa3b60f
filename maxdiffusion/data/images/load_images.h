// All images or clips of a source in memory at once, prepared for training.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/data/images/prepare.h"

namespace md {

struct LoadedImages {
  HostArray pixels;  // u8 [N, H, W, 3]; of clips u8 [N, F, H, W, 3]
  /// As in PreparedImage, with axis 0 for the images; absent where not asked for. mirrored_time_ids belong to the
  /// mirrored images.
  HostArray mask, time_ids, mirrored_time_ids;
  std::vector<std::string> captions, names;
  std::vector<std::string> skipped;  // "file: reason"
  std::string fingerprint;  // content key of images, captions and options; from each_group: the text that it hashes
};
/// Loads every image that decodes, in stored order and not mirrored; decodes on all cores. Each image that does not
/// decode is named in a warning and listed in `skipped`. Progress is logged every few seconds. Throws io when none
/// decodes, invalid_config for random_crop or random_start (what changes needs image_batches), internal for a config
/// with buckets.
LoadedImages load_images(const std::shared_ptr<const RecordSource>& source, const ImageConfig& config);
/// Loads as load_images does, into one element for each bucket that holds images, by width, then height; into one
/// element without buckets. The first element lists what all of them skipped.
std::vector<LoadedImages> load_in_aspect_buckets(const std::shared_ptr<const RecordSource>& source,
                                                 const ImageConfig& config);
/// Loads as load_images does, but at most `together` images at a time, so that a data set need not fit into memory.
/// `take` gets the images of one size that were read together. Returns what was skipped, as "file: reason".
std::vector<std::string> each_group(const std::shared_ptr<const RecordSource>& source, const ImageConfig& config,
                                    int64_t together, const std::function<void(LoadedImages&& group)>& take);

}  // namespace md
