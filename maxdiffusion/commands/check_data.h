// Checks of a data set for `check`, and the overview images it writes.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/data/records/records.h"

namespace md {

/// Decodes all images. Warns about images that are damaged, much enlarged, rotated by EXIF, duplicates or without a
/// caption. `folder`: for buckets.png and contact_sheet.png; empty: they are not written. Throws io if no image is
/// left.
void check_images(const std::shared_ptr<const RecordSource>& source, const ImageConfig& images, uint64_t seed,
                  const std::string& folder);

}  // namespace md
