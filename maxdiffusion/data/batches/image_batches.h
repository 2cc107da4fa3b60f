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
  int workers = 0;    // threads that read and decode; 0: one for each core
};
/// Makes arrays of captions, such as token ids, one row for each. Called on the thread that calls next().
using EncodeCaptions = std::function<Batch(const std::vector<std::string>&)>;

/// Batches in the order of a RecordStream: the arrays of PreparedImage with axis 0 for the images, and the arrays of
/// `captions`. An image that does not decode is replaced by the next record, with one warning; an epoch in which none
/// decodes throws io. `images` must have no buckets, or one. With several processes that read records by number, a
/// process does not know which records the others skip. There the following record replaces a skipped one and occurs
/// twice, so that all processes keep the same position.
std::unique_ptr<Dataset> image_batches(std::shared_ptr<const RecordSource> source, const ImageConfig& images,
                                       const BatchConfig& batches, EncodeCaptions captions);

/// The records of each bucket. Images whose header cannot be read, or that are too small for a bucket, are skipped with
/// a warning.
struct ImagesInBuckets {
  std::shared_ptr<const RecordSource> source;  // by number; one that is read in order is reopened for each record
  std::vector<ImageSize> sizes;                // of the buckets that have images
  std::vector<std::vector<int64_t>> records;   // record numbers of each bucket
  int64_t skipped = 0;                         // number of skipped images
  /// What each of them holds, if it was requested.
  struct Key {
    std::string media;    // RecordContent::media
    std::string caption;  // hash of the caption after the folder's rules, without random changes
    int64_t folder = -1;
  };
  std::vector<std::vector<Key>> keys = {};
};
/// Reads the headers of all images; for clips, the first frame and all timestamps, which reads the whole file. Without
/// buckets nothing is read, nor with `unread` if there is only one: all records are in one bucket. `hashes`: adds
/// keys; records whose content cannot be read are skipped. Throws io if no image remains.
ImagesInBuckets sort_into_aspect_buckets(std::shared_ptr<const RecordSource> source, const ImageConfig& config,
                                         bool unread = false, FileHashes* hashes = nullptr);
/// Batches of one bucket each, in AspectBucketOrder, with the same arrays. An image that does not decode is replaced by
/// the bucket's next one; a bucket in which none decodes throws io.
std::unique_ptr<Dataset> image_batches(ImagesInBuckets images, const ImageConfig& config, const BatchConfig& batches,
                                       EncodeCaptions captions);
/// Stacks the arrays of records. Throws io naming the record whose arrays differ in names, types or sizes from those
/// before.
std::unique_ptr<Dataset> array_batches(std::shared_ptr<const RecordSource> source, const BatchConfig& config);

}  // namespace md
