// Batches of images or clips that are read, decoded and prepared while training.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/data/batches/aspect_bucket_batches.h"
#include "maxdiffusion/data/images/prepare.h"

namespace md {

struct BatchConfig {
  StreamConfig stream;
  int64_t batch = 1;  // rows of all processes
  int workers = 0;    // threads that read and decode; 0: the cores
};
/// Makes arrays of captions, such as token ids, one row for each. Called on the thread that calls next().
using EncodeCaptions = std::function<Batch(const std::vector<std::string>&)>;

/// Batches in the order of a RecordStream: the arrays of PreparedImage with axis 0 for the images, and what `captions`
/// makes. An image that does not decode is named in a warning, once, and the next record takes its place; an epoch in
/// which none decodes throws io. `images` must have no buckets, or one.
/// Where several processes take records by number, a process does not know what the others skip: there the record that
/// follows takes the place and comes twice, so that all processes keep the same position.
std::unique_ptr<Dataset> image_batches(std::shared_ptr<const RecordSource> source, const ImageConfig& images,
                                       const BatchConfig& batches, EncodeCaptions captions);

/// Which records belong to which bucket. Images whose header cannot be read, and those too small for a bucket, are
/// named in a warning and left out.
struct ImagesInBuckets {
  std::shared_ptr<const RecordSource> source;  // by number; one that is read in order is reopened for each record
  std::vector<ImageSize> sizes;                // of the buckets that hold images
  std::vector<std::vector<int64_t>> records;   // of each of them
  int64_t skipped = 0;                         // images that are left out
};
/// Reads the headers of all images; of clips the first frame and the times of all, which reads their files. Without
/// buckets, and with `unread` where there is only one, nothing is read, and all belong to it. Throws io where no image
/// is left.
ImagesInBuckets sort_into_aspect_buckets(std::shared_ptr<const RecordSource> source, const ImageConfig& config,
                                         bool unread = false);
/// Batches of one bucket each, in AspectBucketOrder, with the same arrays. The next image of the bucket takes the place
/// of one that does not decode; a bucket in which none decodes throws io.
std::unique_ptr<Dataset> image_batches(ImagesInBuckets images, const ImageConfig& config, const BatchConfig& batches,
                                       EncodeCaptions captions);
/// The arrays of records, stacked. Throws io naming the record whose arrays have other names, types or sizes than those
/// before.
std::unique_ptr<Dataset> array_batches(std::shared_ptr<const RecordSource> source, const BatchConfig& config);

}  // namespace md
