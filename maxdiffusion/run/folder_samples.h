// Samples of a data set of several folders, repeated as their folder says, with captions from their random bits.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/folders/data_folders.h"
#include "maxdiffusion/run/encode_dataset.h"

namespace md {

/// Repeats each record of a bucket as often as it occurs in an epoch.
ImagesInBuckets repeated(ImagesInBuckets images, const DataFolders& folders);

/// Text fields that replace cached ones.
struct FolderText {
  /// Encodes one caption (axis 0 = 1) for samples whose caption varies. None: all samples use the cached fields.
  std::function<HostArrays(const std::string&)> fields;
  /// Cached fields of the empty caption, for samples whose caption is dropped.
  HostArrays empty;
};
/// The samples of one bucket of `cache`, repeated.
std::shared_ptr<const Examples> folder_samples(const std::shared_ptr<const CachedSamples>& cache,
                                               std::shared_ptr<const DataFolders> folders, const ImageConfig& images,
                                               FolderText text);

}  // namespace md
