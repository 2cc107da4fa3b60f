// Datasets: named host arrays per step, with a position that is saved with the training state.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/data/records/position.h"
#include "maxdiffusion/mesh/batch_share.h"

namespace md {

/// Arrays of one step; axis 0 is the batch.
using Batch = HostArrays;

class Dataset {
 public:
  virtual ~Dataset() = default;
  /// The next batch; endless (a new seeded shuffle per epoch). With several processes, each returns the rows of its
  /// BatchShare. Throws io naming file and reason.
  virtual Batch next() = 0;
  virtual Position position() const = 0;
  /// Continues at `p`. Data that has no such position, as after samples were removed, continues at the beginning of the
  /// next epoch: returns false. Throws io for numbers below 0.
  virtual bool seek(Position p) = 0;
  virtual int64_t size() const = 0;  // samples per epoch; −1: not known
};

/// Runs another dataset on its own thread, `depth` batches ahead. position() is the one after the batch that next()
/// returned last, not after the one being prepared. Throws invalid_config if depth < 1. next() throws an exception of
/// the thread after the batches prepared before it, and again until seek(). Call next() and seek() from one thread;
/// position() may be called from any.
std::unique_ptr<Dataset> prefetch(std::unique_ptr<Dataset> source, int depth);

/// Applies `change` to every batch. Positions are those of `source`.
std::unique_ptr<Dataset> mapped(std::unique_ptr<Dataset> source, std::function<Batch(Batch)> change);

/// A sample of a batch: its number and its random bits for this epoch.
struct ExampleRef {
  int64_t index;
  uint64_t bits;
};
/// Training samples by number. Thread safe.
class Examples {
 public:
  virtual ~Examples() = default;
  virtual int64_t size() const = 0;
  /// The fields of one sample, without the batch axis; they may borrow a memory-mapped file. All samples have the same
  /// fields.
  virtual HostArrays read(const ExampleRef& which) const = 0;
};
/// The rows of arrays in memory. All arrays have the same axis-0 size.
std::shared_ptr<const Examples> examples_in_memory(HostArrays arrays);
/// The fields of these samples, stacked along axis 0.
Batch batch_of(const Examples& samples, const std::vector<ExampleRef>& which);

/// Batches shuffled by (seed, epoch). Every sample occurs once per epoch. The last batch of an epoch is filled from the
/// next epoch (or several, if the batch is larger than an epoch), so every batch is full. `batch`: rows of all
/// processes. Every process has all samples and the same position.
std::unique_ptr<Dataset> example_batches(std::shared_ptr<const Examples> samples, int64_t batch, uint64_t seed,
                                         bool shuffle = true, const BatchShare& share = {});
/// Like the above for examples_in_memory.
std::unique_ptr<Dataset> in_memory(HostArrays arrays, int64_t batch, uint64_t seed, bool shuffle = true,
                                   const BatchShare& share = {});

}  // namespace md
