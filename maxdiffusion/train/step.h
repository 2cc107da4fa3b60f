// One training step as one graph: loss → gradients → update. The state goes in and comes out under the same names, and
// its memory is reused.
//   step s32 [], healthy pred []             the clock; false from the first loss that is not finite on
//   updates/MODEL s32 []                   of this model alone, with per_model_step_count
//   MODEL/PATH                           trained parameters
//   and behind the prefixes below            what belongs to each of them, f32
// Other inputs: key u32 [2] of the run's seed, the frozen parameters, and the task's batch; of several replicas
// replica s32 [], the number of this one. Out: state, loss,
// grad_norm, learning_rate; with per_model_step_count also loss_MODEL.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/mesh/shards.h"
#include "maxdiffusion/optim/optimizer.h"
#include "maxdiffusion/tasks/task.h"

namespace md {

/// What the state calls an array that belongs to a trained parameter: one of these, or the prefix of a slot of the
/// optimizer, and the parameter's own name.
namespace state_prefix {
inline constexpr char kAverage[] = "ema/";    // with ema_decay > 0
inline constexpr char kMaster[] = "master/";  // of which the parameter is the rounding, where it is narrower than f32
                                              // and low_precision_update is master_f32
}  // namespace state_prefix

struct StepOptions {
  ScopeOptions scope;
  OptimConfig optim;
  double ema_decay = 0;
  /// Processes that each make this step with their part of the update's samples (Devices::replicas).
  int64_t replicas = 1;
  /// Batches of the task in one update, one after the other; their gradients are averaged.
  int64_t accumulation = 1;
  /// The run's tasks train different models alternately: optimizer and averages count the updates of their own model.
  bool per_model_step_count = false;
  /// Peak learning rates of components that do not have the optimizer's. Each component is clipped and updated
  /// separately.
  std::map<std::string, double> learning_rates;
  /// Changes the scope of a component: frozen, or with LoRA. Empty: every component is trained whole.
  std::function<Scope(const std::string& component, const Scope&)> change_scope;
};

struct StepGraph {
  std::unique_ptr<Graph> graph;
  ParamTable params;
  std::vector<BatchField> fields;
  double flops = 0;  // of one step on all devices: products of the loss and its gradients, count_flops
};

/// The table with f32 in place of narrower types of trained parameters. Starting values have these types, so that
/// masters and averages start from exactly what the files hold.
ParamTable in_f32(const ParamTable& params);
/// What belongs to each trained parameter: slots of the optimizer, and the average where there is one.
std::vector<StateSlot> state_slots(const StepOptions& step);
/// Starts these slots of trained parameters that a state has, where it lacks them; whether it lacked any.
bool add_slots(const ParamTable& params, const std::vector<StateSlot>& slots, NamedShards& state);
/// The state before the first step, by name, from starting values of all parameters (of the types of in_f32). `step`
/// and `healthy` are not in it.
NamedShards initial_state(const ParamTable& params, NamedShards values, const StepOptions& step);
/// The state of a checkpoint in the types of this run's step: parameters are rounded from their masters, masters that
/// the checkpoint lacks start from the parameters.
NamedShards restored_state(const ParamTable& params, NamedShards state, const StepOptions& step);
/// The trained parameters, by name, as they are sampled and saved as the model: their averages where the state has
/// them, in the parameters' types.
NamedShards model_values(const ParamTable& params, const NamedShards& state);

/// A step whose loss or gradient norm is not finite changes nothing but `healthy`, and neither do the steps after it:
/// the state stays what it was before the bad step.
StepGraph trace_step(const Task& task, const GraphOptions& options, const StepOptions& step);

}  // namespace md
