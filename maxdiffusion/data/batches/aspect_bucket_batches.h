// Batches of one bucket each: which samples are in which batch, in an order whose position can be saved and restored.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/data/images/aspect_buckets.h"
#include "maxdiffusion/data/records/records.h"

namespace md {

/// Each bucket has its own epochs: every sample once per epoch, shuffled by (seed, bucket, epoch). A batch takes a
/// bucket's next samples and continues into the bucket's next epoch. So all batches are full, no sample is dropped,
/// every sample occurs equally often, and a bucket smaller than a batch yields one only every few epochs. An epoch
/// consists of the batches that all buckets have filled by its end, shuffled by (seed, epoch). Several processes use
/// the same bucket at the same time; each takes its rows of the batch.
class AspectBucketOrder {
 public:
  /// `counts`: number of samples of each bucket. `batch`: rows of all processes in a batch.
  AspectBucketOrder(std::vector<int64_t> counts, int64_t batch, const StreamConfig& config);

  struct Choice {
    size_t bucket = 0;
    std::vector<ExampleRef> samples;  // numbered within the bucket
  };
  Choice next();
  /// Counts the samples of all processes; every process has the same position.
  Position position() const { return at_; }
  /// As Dataset::seek. Buckets have only positions between batches of their size.
  bool seek(Position p);
  int64_t size() const;  // samples of all buckets

 private:
  void plan(int64_t epoch);
  std::vector<int64_t> counts_;
  int64_t batch_;
  StreamConfig config_;
  std::vector<int64_t> mine_;  // this process's rows of a batch
  Position at_;
  int64_t planned_ = -1;                                               // the epoch of batches_
  std::vector<std::pair<size_t, int64_t>> batches_;                    // bucket, number of the batch since epoch 0
  std::map<std::pair<size_t, int64_t>, std::vector<int64_t>> orders_;  // of bucket and epoch
};

/// Batches of the samples of each bucket; `batch` and positions as in AspectBucketOrder. All buckets have the same
/// fields; shapes differ only in the sizes of images.
std::unique_ptr<Dataset> examples_in_aspect_buckets(std::vector<std::shared_ptr<const Examples>> buckets, int64_t batch,
                                                    const StreamConfig& config);
/// Like the above for examples_in_memory.
std::unique_ptr<Dataset> in_aspect_buckets(std::vector<Batch> buckets, int64_t batch, const StreamConfig& config);

/// Logs a line per bucket, and a warning for one whose samples do not fill a batch. `batch`: samples of all processes.
void log_aspect_buckets(const std::vector<ImageSize>& sizes, const std::vector<int64_t>& images, int64_t batch);

}  // namespace md
