// Batches of images that are read, decoded and prepared while training.
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
/// What captions become, a row each: token ids, say. Called on the thread that calls next().
using EncodeCaptions = std::function<Batch(const std::vector<std::string>&)>;

/// Batches as they come from a source: the arrays of PreparedImage with axis 0, and what `captions` makes. Pictures
/// that do not decode are named in a warning, once each, and the next record takes their place; an epoch without one
/// that does is io. Without buckets.
/// Of several processes that have records by number, none knows what the others skip: there the record behind takes the
/// place and comes twice, so that positions stay the same in each.
std::unique_ptr<Dataset> image_batches(std::shared_ptr<const RecordSource> source, const ImageConfig& pictures,
                                       const BatchConfig& config, EncodeCaptions captions);

/// Which records are of which bucket: found out by reading all their headers. Pictures without one, and those too small
/// for a bucket, are named in a warning and left out.
struct ImagesInBuckets {
  std::shared_ptr<const RecordSource> source;  // by number; one that is read in order is opened anew for each record
  std::vector<ImageSize> sizes;                // of the buckets that hold pictures
  std::vector<std::vector<int64_t>> records;   // of each of them
};
/// Throws io where no picture is left.
ImagesInBuckets sort_into_aspect_buckets(std::shared_ptr<const RecordSource> source, const ImageConfig& config);
/// As above, every batch of one bucket, in AspectBucketOrder. The place of a picture that does not decode is taken by
/// the next of its bucket; a bucket without one that does is io.
std::unique_ptr<Dataset> image_batches(ImagesInBuckets pictures, const ImageConfig& config, const BatchConfig& batches,
                                       EncodeCaptions captions);
/// The arrays of records, stacked. Throws io naming the record whose arrays have other names, types or sizes than those
/// before.
std::unique_ptr<Dataset> array_batches(std::shared_ptr<const RecordSource> source, const BatchConfig& config);

}  // namespace md
