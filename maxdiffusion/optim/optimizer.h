// Optimizers and learning-rate schedules as graph functions; schedules have the names and formulas of diffusers'
// `optimization`. Clipping, averages and skipped updates are in train/update.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/graph/graph.h"

namespace md {

/// A key of one optimizer, and its value.
struct OptimizerKey {
  const char *optimizer, *name;
  std::variant<bool, double> value;
  const char* meaning;
  std::optional<KeyRange> range = {};
};
/// The keys of all optimizers, with their defaults.
std::vector<OptimizerKey> optimizer_keys();
/// The values of the key `optimizer`.
std::vector<std::string> optimizer_names();

struct OptimConfig {
  std::string optimizer = "adamw";
  double learning_rate = 1e-5;
  bool scale_lr = false;
  int64_t max_train_steps = 1500;
  int64_t learning_rate_schedule_steps = -1;  // -1: max_train_steps
  double warmup_steps_fraction = 0.1;
  std::string lr_scheduler = "constant_with_warmup";
  double lr_num_cycles = 1, lr_power = 1;
  double max_grad_norm = 1.0;   // ≤ 0: no clipping
  double max_grad_value = 1.0;  // ≤ 0: no clipping
  bool opt_enable_grad_clipping = false, opt_enable_grad_global_norm_clipping = false;
  std::string low_precision_update = "master_f32";
  std::vector<OptimizerKey> own_keys = optimizer_keys();

  /// The value of one of own_keys: double or bool.
  template <class T>
  T& own(std::string_view key) {
    for (OptimizerKey& k : own_keys)
      if (k.name == key) return std::get<T>(k.value);
    fail(Code::internal, "no optimizer reads the key '{}'", key);
  }
  /// A copy with max_grad_value and max_grad_norm set to 0 if their switches are off. `always_by_norm`: clipping by
  /// norm has no switch.
  OptimConfig with_switches(bool always_by_norm) const;
  template <class V>
  void visit(V&& v) {
    v("optimizer", optimizer, "how gradients move the weights", one_of(optimizer_names()));
    v("learning_rate", learning_rate, "peak step size", at_least(0));
    v("scale_lr", scale_lr, "multiply the learning rate by the global batch size");
    v("max_train_steps", max_train_steps, "optimizer updates; -1: num_train_epochs passes over the data", at_least(-1));
    v("learning_rate_schedule_steps", learning_rate_schedule_steps, "length of the schedule; -1: max_train_steps");
    v("warmup_steps_fraction", warmup_steps_fraction, "part of the schedule spent warming up", in_range(0, 1));
    v("lr_scheduler", lr_scheduler, "schedule of the learning rate, by diffusers' formulas",
      one_of({"constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"}));
    v("lr_num_cycles", lr_num_cycles, "restarts of cosine_with_restarts");
    v("lr_power", lr_power, "exponent of polynomial");
    for (OptimizerKey& k : own_keys)
      if (bool* flag = std::get_if<bool>(&k.value))
        v(k.name, *flag, k.meaning);
      else
        v(k.name, std::get<double>(k.value), k.meaning, k.range);
    v("max_grad_norm", max_grad_norm,
      "clip the global norm of the gradients to this; <= 0: off; SDXL: with opt_enable_grad_global_norm_clipping");
    v("max_grad_value", max_grad_value, "clip each gradient element to this, with opt_enable_grad_clipping");
    v("opt_enable_grad_clipping", opt_enable_grad_clipping, "clip by max_grad_value");
    v("opt_enable_grad_global_norm_clipping", opt_enable_grad_global_norm_clipping, "clip by max_grad_norm");
    v("low_precision_update", low_precision_update,
      "weights_dtype narrower than float32: master_f32 (a float32 copy is updated), stochastic_rounding (updated "
      "weights are rounded up or down at random) or round_to_nearest (small updates are lost)",
      one_of({"master_f32", "stochastic_rounding", "round_to_nearest"}));
  }
};

/// Learning rate of update number `step` (scalar s32, from 0), f32 scalar.
Tensor learning_rate(const OptimConfig& config, Tensor step);
/// The learning rate, computed on the host.
double learning_rate(const OptimConfig& config, int64_t step);

/// An optimizer state for every parameter: f32, of the parameter's shape.
struct StateSlot {
  const char* prefix;  // prefix of its name in the training state, unique among optimizers: "adam_m/"
  enum class Start { zeros, copy } start = Start::zeros;  // copy: the parameter's value
};

/// Scalars of one update, shared by all parameters.
struct StepScalars {
  Tensor learning_rate, updates;  // f32 scalars; number of earlier updates of these parameters
  Tensor applied;                 // pred scalar; false: nothing changes
  Tensor keep;  // f32 scalar: average ← param + (average − param)·keep, with the new param; empty: no moving averages
};
/// One parameter's update from f32 arrays: the new parameter and its new slots, in their order.
using UpdateRule = std::function<std::vector<Tensor>(Tensor param, Tensor grad, const std::vector<Tensor>& slots)>;

/// A kernel call that clips and updates many parameters, and their averages, in one pass. Operands: `scalars` (f32
/// [n]), then lists of equal length: gradients, parameters, each slot, and averages if any. Results: all lists but the
/// gradients, in place.
struct FusedCall {
  const char* kernel;
  std::string config;  // its attributes
  Tensor scalars;
};

/// The update rule. Immutable; made from keys.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::vector<StateSlot> slots() const = 0;
  /// Reads the first two scalars; values that depend only on them are traced once for all parameters.
  virtual UpdateRule rule(const StepScalars& s) const = 0;
  /// The rule as a CPU kernel, if there is one, because a traced rule for every parameter compiles slowly. It clips the
  /// elements of gradients to max_value (≤ 0: no limit), then multiplies them by the f32 scalar `factor`.
  virtual std::optional<FusedCall> fused(const StepScalars&, double /*max_value*/, Tensor /*factor*/) const {
    return {};
  }
  /// Class and arguments as kohya's metadata names them: "torch.optim.sgd.SGD(momentum=0.9)".
  virtual std::string full_name() const = 0;
};

/// The optimizer that config.optimizer names. Throws invalid_config, listing the names, for another.
std::unique_ptr<Optimizer> make_optimizer(const OptimConfig& config);

}  // namespace md
