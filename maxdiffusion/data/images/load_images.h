// Images or clips that are prepared together in memory, before training.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/data/images/prepare.h"

namespace md {

struct LoadedImages {
  HostArray pixels;  // u8 [N, H, W, 3]; clips: u8 [N, F, H, W, 3]; absent if there are none
  /// As in PreparedImage, with axis 0 for the images; absent if not requested. mirrored_mask and mirrored_time_ids
  /// belong to the mirrored images, with random_flip.
  HostArray mask, mirrored_mask, time_ids, mirrored_time_ids;
  std::vector<HostArray> references;         // for each reference column, u8 [N, H, W, 3]
  std::vector<std::string> captions, names;  // captions without random changes
  std::vector<int64_t> numbers;              // of their records
  std::vector<std::string> skipped;          // "file: reason"
};
/// Loads records by number, not mirrored; decodes on all cores. An image that does not decode, or does not have `size`
/// (if not null), is listed in `skipped` with a warning. Throws invalid_config for random_crop or random_start, which
/// need image_batches as they change at each use.
LoadedImages load_images(const RecordSource& source, const std::vector<int64_t>& records, const ImageConfig& config,
                         const ImageSize* size = nullptr);
/// All records of a source, which must have one size. Throws io when none decodes.
LoadedImages load_images(const std::shared_ptr<const RecordSource>& source, const ImageConfig& config);
/// [..., W, C], mirrored left to right.
HostArray mirrored(const HostArray& images);

}  // namespace md
