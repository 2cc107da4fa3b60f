// Optimizers and learning-rate schedules as graph functions; schedules have the names and formulas of diffusers'
// `optimization`, rex of Chen et al. 2021, warmup_stable_decay of transformers. Clipping, averages and skipped updates
// are in train/update.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/graph/graph.h"

namespace md {

/// A key of one optimizer with its value.
struct OptimizerKey {
  const char *optimizer, *name;
  std::variant<bool, double> value;
  const char* meaning;
  std::optional<KeyRange> range = {};
};
/// The keys of all optimizers, with their defaults.
std::vector<OptimizerKey> optimizer_keys();
/// An argument of an optimizer under its name in the optimizer's Python package, as in `optimizer_args`.
struct OptimizerArgument {
  using Value = std::variant<bool, double, std::optional<double>, std::vector<double>, std::string>;
  std::string name;
  Value value;  // default; lists keep their length, and a text is one of `words`
  std::string meaning;
  std::optional<KeyRange> range = {};  // of each number
  std::vector<std::string> words = {};
};
/// "0.9", "True", "None", "(0.9, 0.99)".
std::string to_string(const OptimizerArgument::Value& value);
/// The arguments of an optimizer, with their defaults.
std::vector<OptimizerArgument> optimizer_arguments(const std::string& optimizer);
/// The values of the key `optimizer`.
std::vector<std::string> optimizer_names();
/// The values of the key `lr_scheduler`.
std::vector<std::string> schedule_names();

struct OptimConfig {
  std::string optimizer = "adamw";
  std::vector<std::string> optimizer_args = {};
  double learning_rate = 1e-5;
  bool scale_lr = false;
  int64_t max_train_steps = 1500;
  int64_t learning_rate_schedule_steps = -1;  // -1: max_train_steps
  double warmup_steps_fraction = 0.1;
  std::string lr_scheduler = "constant_with_warmup";
  double lr_num_cycles = 1, lr_power = 1;
  double lr_warmup_steps = -1;  // below 1: a fraction of the schedule; -1: warmup_steps_fraction
  double lr_decay_steps = 0;    // below 1: a fraction of the schedule
  double lr_scheduler_min_lr_ratio = 0;
  double max_grad_norm = 1.0;   // ≤ 0: no clipping
  double max_grad_value = 1.0;  // ≤ 0: no clipping
  bool opt_enable_grad_clipping = false, opt_enable_grad_global_norm_clipping = false;
  std::string low_precision_update = "master_f32", moments_dtype = "float32";
  std::vector<OptimizerKey> key_values = optimizer_keys();

  /// The value of one key of key_values; T: double or bool.
  template <class T>
  T& optimizer_arg(std::string_view key) {
    for (OptimizerKey& k : key_values)
      if (k.name == key) return std::get<T>(k.value);
    fail(Code::internal, "no optimizer reads the key '{}'", key);
  }
  /// A copy with max_grad_value and max_grad_norm set to 0 if their switches are off. `always_by_norm`: clipping by
  /// norm has no switch.
  OptimConfig with_switches(bool always_by_norm) const;
  template <class V>
  void visit(V&& v) {
    v("optimizer", optimizer, "how gradients move the weights", one_of(optimizer_names()));
    v("optimizer_args", optimizer_args,
      "arguments of the optimizer, [weight_decay=0.1, \"betas=0.9,0.99\"], by the names in the table below");
    v("learning_rate", learning_rate, "peak step size", at_least(0));
    v("scale_lr", scale_lr, "multiply the learning rate by the global batch size");
    v("max_train_steps", max_train_steps, "optimizer updates; -1: num_train_epochs passes over the data", at_least(-1));
    v("learning_rate_schedule_steps", learning_rate_schedule_steps, "length of the schedule; -1: max_train_steps");
    v("warmup_steps_fraction", warmup_steps_fraction, "part of the schedule spent warming up", in_range(0, 1));
    v("lr_warmup_steps", lr_warmup_steps,
      "updates of warming up; below 1: a part of the schedule; -1: warmup_steps_fraction says", at_least(-1));
    v("lr_scheduler", lr_scheduler, "schedule of the learning rate, by diffusers' formulas", one_of(schedule_names()));
    v("lr_num_cycles", lr_num_cycles, "restarts of cosine_with_restarts, half waves of warmup_stable_decay");
    v("lr_power", lr_power, "exponent of polynomial");
    v("lr_decay_steps", lr_decay_steps,
      "updates of warmup_stable_decay's descent, the last ones; below 1: a part of the schedule", at_least(0));
    v("lr_scheduler_min_lr_ratio", lr_scheduler_min_lr_ratio,
      "where cosine, rex and warmup_stable_decay end, as a part of the learning rate", in_range(0, 1));
    for (OptimizerKey& k : key_values)
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
    v("moments_dtype", moments_dtype,
      "dtype that the optimizer's moments are stored in; bfloat16 takes half of the memory and is rounded up or down "
      "at "
      "random, so that small changes add up",
      one_of({"float32", "bfloat16"}));
  }
};

/// Learning rate of update `step` (s32 scalar, from 0): f32 scalar.
Tensor learning_rate(const OptimConfig& config, Tensor step);
/// The learning rate, computed on the host.
double learning_rate(const OptimConfig& config, int64_t step);

/// Number of updates in the schedule's warm-up.
int64_t warmup_updates(const OptimConfig& config);

/// Properties of a parameter that determine its optimizer state.
struct ParamForm {
  Dims dims;
  LogicalAxes axes;     // one per dim, or none
  int64_t stacked = 0;  // n > 0: dim 0 is a stack of n layers, each updated as a separate parameter
};
/// An array of an optimizer's state.
struct StateArray {
  Shape shape;
  LogicalAxes axes;  // one per dim, or none
};

/// A kind of optimizer state that parameters have.
struct StateSlot {
  const char* prefix;  // prefix of its name in the training state, unique among optimizers: "adam_m/"
  enum class Start { zeros, copy } start = Start::zeros;  // copy: the parameter's value
  /// The state array of a parameter; none if the parameter has none. Empty: f32, with the parameter's dims and axes.
  std::function<std::optional<StateArray>(const ParamForm&)> form = {};

  std::optional<StateArray> array(const ParamForm& p) const;
};
/// A number (f32) of an optimizer's state that a component's parameters, which are updated together, share.
struct StateScalar {
  const char* prefix;  // as in StateSlot; the component's name follows
  double start = 0;
  const char* metric = nullptr;  // name of a metric of the run; null: none
};

/// Scalars of one update, shared by all parameters.
struct StepScalars {
  Tensor learning_rate, updates;  // f32 scalars; number of earlier updates of these parameters
  Tensor applied;                 // pred scalar; false: the update is skipped
  Tensor keep;  // f32 scalar: average ← param + (average − param)·keep, with the new param; empty: no moving averages
};
/// A parameter, its gradient (f32) and its state arrays; an array is empty if the parameter has none of that slot.
struct ParamState {
  Tensor value, gradient;
  std::vector<Tensor> slots;
  int64_t stacked = 0;  // see ParamForm

  /// Number of leading dims that are layers: 1 if stacked, else 0.
  int64_t first() const { return stacked > 0 ? 1 : 0; }
  int64_t own_rank() const { return value.rank() - first(); }
  /// The dims of one layer.
  Axes own_axes() const;
};
/// One parameter's update: the new parameter and its new slots, in their order.
using UpdateRule = std::function<std::vector<Tensor>(const ParamState&)>;
/// Parameters that are updated together, and their scalars in the order of Optimizer::scalars.
struct GroupState {
  std::vector<ParamState> params;
  std::vector<Tensor> scalars;
};

/// A kernel call that clips and updates many parameters and their moving averages in one pass. Operands: `scalars` (f32
/// [n]), then lists of equal length: gradients, parameters, each slot, and averages if any. Results, in place: all
/// lists except the gradients.
struct FusedCall {
  const char* kernel;
  std::string config;  // attributes of the call
  Tensor scalars;
  std::function<bool(const ParamState&)> takes = {};  // supported parameters; empty: all; others use rule()
  std::vector<size_t> slots = {};                     // slots that are operands; empty: all
  bool layers = false;                                // it has an attribute `layers`: each parameter's number of layers
  bool whole = false;                                 // parameters cannot be sharded: one device only
};

/// The update rule, constructed from keys and arguments. Immutable. An optimizer implements either rule() or update().
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::vector<StateSlot> slots() const = 0;
  virtual std::vector<StateScalar> scalars() const { return {}; }
  /// The update of one parameter. Uses learning_rate and updates of `s`; values that depend only on these are traced
  /// once for all parameters.
  virtual UpdateRule rule(const StepScalars& s) const;
  /// Updates a group of parameters; by default each with rule(). Optimizers whose parameters depend on each other
  /// override it.
  virtual GroupState update(const StepScalars& s, GroupState group) const;
  /// Whether it determines its step size itself: it ignores learning_rate, and schedules start at 1.
  virtual bool has_own_rate() const { return false; }
  /// Whether the parameters of a component depend on each other: they share one learning rate.
  bool is_joint() const { return !scalars().empty(); }
  /// Whether gradients are evaluated at another point than the parameters, which are the ones that are saved and
  /// sampled.
  virtual bool looks_ahead() const { return false; }
  /// The point at which gradients are evaluated, f32.
  virtual Tensor point(Tensor param, const std::vector<Tensor>& /*slots*/) const { return param; }
  /// The rule as CPU kernels, if there are any, because tracing the rule for every parameter compiles slowly. Each
  /// parameter is updated by the first that takes it. Kernels clip the elements of gradients to max_value (≤ 0: no
  /// limit), then multiply them by the f32 scalar `factor`.
  virtual std::vector<FusedCall> fused(const StepScalars&, double /*max_value*/, Tensor /*factor*/) const { return {}; }
  /// Class and arguments as kohya's metadata names them: "torch.optim.sgd.SGD(momentum=0.9)".
  virtual std::string full_name() const = 0;
};

/// The slots of the optimizer named by config.optimizer. With config.moments_dtype=bfloat16, slots that start at zero
/// and have the parameter's shape are bf16; copies of weights and slots with another shape are unchanged.
std::vector<StateSlot> optimizer_slots(const OptimConfig& config);
/// Whether moments_dtype=bfloat16 changes a slot of this optimizer.
bool has_moments_of_parameters(const Optimizer& optimizer);

/// Prefixes of the names of the optimizer's state.
std::vector<std::string> state_prefixes(const Optimizer& optimizer);

/// The optimizer named by config.optimizer. Throws invalid_config, listing the names, for an unknown one.
std::unique_ptr<Optimizer> make_optimizer(const OptimConfig& config);

}  // namespace md
