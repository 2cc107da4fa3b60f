// A task: the fields of a batch, and the loss. One loop (train/loop.h) trains all tasks.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/mesh/shards.h"
#include "maxdiffusion/ops/random.h"

namespace md {

/// One array of a batch. If `batched`, axis 0 is the global batch; otherwise the array is equal in every step.
struct BatchField {
  std::string name;
  Shape shape;
  bool batched = true;
};
/// A family's field for batch size `b`.
BatchField batch_field(int64_t b, const Field& field);

/// A batch as graph tensors, by field name.
using Feed = std::map<std::string, Tensor>;

/// Losses of a task on held-out samples at given timesteps, for evaluation.
struct TimedLosses {
  std::vector<BatchField> batch;          // includes a field kTimesteps [B]
  int64_t num_train_timesteps = 1000;     // timesteps are in [0, this)
  std::function<bool(int64_t t)> trains;  // whether the task trains timestep t; empty: it trains all
  /// Losses [B] f32, neither weighted nor masked.
  std::function<Tensor(const Models& models, const Feed& feed, Rng rng)> losses;
};
inline constexpr const char* kTimesteps = "timesteps";

class Task {
 public:
  virtual ~Task() = default;
  /// The component that is trained ("unet", "vae"), which is also the name of its folder in checkpoints.
  virtual std::string model() const = 0;
  /// Distinguishes the task in logs if one loop has several: the expert, the size of its media. Empty for a single
  /// task.
  virtual std::string label() const { return ""; }
  virtual std::vector<BatchField> batch() const = 0;
  /// Scalar f32. Parameters are created in the scopes of `models`; `rng` is already specific to the step.
  virtual Tensor loss(const Models& models, const Feed& feed, Rng rng) const = 0;
  /// Row numbers for random numbers (Rng::with_rows), s32 [B], of the equal part of a batch that replica `replica` (s32
  /// scalar) holds, so that the parts get the same random numbers as one batch.
  virtual Tensor batch_rows(Tensor replica, int64_t replicas) const;
  /// If several tasks of a run accept the same batch, each step trains one, chosen at random with these weights.
  virtual double sampling_weight() const { return 1; }
  /// Whether the task accepts a batch that has its shapes.
  virtual bool accepts(const NamedShards& /*batch*/) const { return true; }
  /// Losses on `samples`: fields with one sample per row. None if the task has no losses by timestep.
  virtual std::optional<TimedLosses> timed_losses(const HostArrays& /*samples*/) const { return {}; }
};

}  // namespace md
