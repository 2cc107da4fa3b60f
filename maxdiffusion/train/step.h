// One training step as one graph: loss → gradients → update. State inputs and outputs have the same names, and share
// memory.
//   step s32 [], healthy pred []             number of updates; false once a loss is not finite
//   updates/MODEL s32 []                     updates of this model only, with per_model_step_count
//   PREFIX/MODEL f32 []                    scalars of the optimizer
//   MODEL/PATH                               trained parameters
//   and with the prefixes below              arrays of each trained parameter, f32
// Other inputs: key u32 [2] of the run's seed, the frozen parameters, and the task's batch; with several replicas
// replica s32 [], this one's index. Outputs: the state, loss, grad_norm, learning_rate, the optimizer's scalars that
// are metrics; with per_model_step_count also loss_MODEL.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/mesh/shards.h"
#include "maxdiffusion/optim/optimizer.h"
#include "maxdiffusion/tasks/task.h"

namespace md {

/// Names of a trained parameter's arrays in the state: one of these, or the prefix of one of the optimizer's slots,
/// followed by the parameter's name.
namespace state_prefix {
inline constexpr char kAverage[] = "ema/";    // with ema_decay > 0
inline constexpr char kMaster[] = "master/";  // f32 copy that the parameter is rounded from, if it is narrower than f32
                                              // and low_precision_update is master_f32
}  // namespace state_prefix

struct StepOptions {
  ScopeOptions scope;
  OptimConfig optim;
  double ema_decay = 0;
  /// Processes that each run this step on their part of the update's samples (Devices::replicas).
  int64_t replicas = 1;
  /// Batches of the task in one update; their gradients are averaged.
  int64_t accumulation = 1;
  /// Whether the run's tasks train different models alternately: optimizer and averages then count the updates of their
  /// model.
  bool per_model_step_count = false;
  /// Peak learning rates of components that differ from the optimizer's. Each component is clipped and updated
  /// separately.
  std::map<std::string, double> learning_rates;
  /// Peak learning rates of parameters whose name (Param::input) contains a match of an expression; the first match
  /// counts.
  std::vector<std::pair<std::string, double>> rates_by_name;
  /// Factor of the learning rate of lora_B. Source: Hayou et al. 2024, LoRA+.
  double loraplus_ratio = 1;
  bool drops_adapters = false;  // adapters have dropout
  /// Expressions: parameters whose name contains a match are not trained and have no optimizer state.
  std::vector<std::string> frozen;
  /// Changes the scope of a component: frozen, or with LoRA. Empty: all parameters are trained.
  std::function<Scope(const std::string& component, const Scope&)> change_scope;
};

struct StepGraph {
  std::unique_ptr<Graph> graph;
  ParamTable params;
  std::vector<BatchField> fields;
  double flops = 0;  // of one step on all devices: matrix products of the loss and its gradients, count_flops
};

/// The table with f32 instead of narrower types for trained parameters. Initial values have these types, so that
/// masters and averages start from exactly the files' values.
ParamTable in_f32(const ParamTable& params);
/// Kinds of state arrays of trained parameters: the optimizer's slots, and the moving average if there is one.
std::vector<StateSlot> state_slots(const StepOptions& step);
/// The state array of a slot for a trained parameter; none if the parameter has none.
std::optional<StateArray> state_array(const StateSlot& slot, const Param& p, const StepOptions& step);
/// Adds initial values of these slots to a state that lacks them. Returns whether any was missing.
bool add_slots(const ParamTable& params, const std::vector<StateSlot>& slots, const StepOptions& step,
               NamedShards& state);
/// Likewise for the optimizer's scalars.
bool add_scalars(const ParamTable& params, const StepOptions& step, NamedShards& state);
/// The state before the first step, by name, from initial values of all parameters (with the types of in_f32). Without
/// `step` and `healthy`.
NamedShards initial_state(const ParamTable& params, NamedShards values, const StepOptions& step);
/// A checkpoint's state in the types of this run's step: parameters are rounded from their masters; missing masters are
/// initialized from the parameters.
NamedShards restored_state(const ParamTable& params, NamedShards state, const StepOptions& step);
/// The trained parameters, by name, for sampling and for the saved model: their moving averages if the state has them,
/// in the parameters' types.
NamedShards model_values(const ParamTable& params, const NamedShards& state);

/// The graph of one step. If a loss or gradient norm is not finite, that step and all later ones change only `healthy`:
/// the state stays as it was before the bad step.
StepGraph trace_step(const Task& task, const GraphOptions& options, const StepOptions& step);

}  // namespace md
