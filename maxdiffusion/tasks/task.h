// Task: what a batch is and what the loss is. There is one loop; tasks differ here and nowhere else.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/nn/scope.h"
#include "maxdiffusion/ops/random.h"

namespace md {

/// One array of a batch. Axis 0 is the global batch when `batched`; otherwise the array is the same every step.
struct BatchField {
  std::string name;
  Shape shape;
  bool batched = true;
};

/// A batch as graph tensors, by field name.
using Feed = std::map<std::string, Tensor>;

/// The root scope of a component: "unet", "text_encoder". Asked for once each.
using Models = std::function<Scope(const std::string& component)>;

class Task {
 public:
  virtual ~Task() = default;
  /// The model that gives the run its name: the folder of its weights ("unet", "vae").
  virtual std::string model() const = 0;
  /// What tells it from other tasks of one loop, for people: a picture size. Empty: it is the only one.
  virtual std::string variant() const { return ""; }
  virtual std::vector<BatchField> batch() const = 0;
  /// Scalar f32. Parameters are asked of the scopes of `models`; `rng` is already that of the step.
  virtual Tensor loss(const Models& models, const Feed& feed, Rng rng) const = 0;
};

}  // namespace md
