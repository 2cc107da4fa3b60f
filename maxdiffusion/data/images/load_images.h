// All images of a source in memory at once, prepared for training.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/data/images/prepare.h"

namespace md {

struct LoadedImages {
  HostArray pixels;  // u8 [N, H, W, 3]
  /// As of PreparedImage, with axis 0; absent where not asked for. Of mirrored pictures time_ids differ.
  HostArray mask, time_ids, mirrored_time_ids;
  std::vector<std::string> captions, names;
  std::vector<std::string> skipped;  // "file: reason"
  std::string fingerprint;           // content key of pictures, captions and options; of a part: what goes into it
};
/// Every picture that decodes, in stored order, on all cores, not mirrored; each that does not is named in a warning
/// and counted. Progress is logged every few seconds. Throws io when none decodes, invalid_config for random_crop:
/// crops that change need image_batches.
LoadedImages load_images(std::shared_ptr<const RecordSource> source, const ImageConfig& config);
/// The same, one for each bucket that holds pictures, in the order of the sizes; without buckets one in all. `skipped`
/// is the first's.
std::vector<LoadedImages> load_in_aspect_buckets(std::shared_ptr<const RecordSource> source, const ImageConfig& config);
/// The same, `together` at a time at most, those of one size given to `take` as a part, so that a data set need not fit
/// into memory; returns what was skipped.
std::vector<std::string> each_group(std::shared_ptr<const RecordSource> source, const ImageConfig& config,
                                    int64_t together, const std::function<void(LoadedImages&& part)>& take);

}  // namespace md
