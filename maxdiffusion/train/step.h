// One training step as one graph: loss → gradients → update. The state goes in and comes out under the same names, in
// the same memory.
//   step s32 [], healthy pred []             the clock; false from the first loss that is not finite on
//   <model>/<path>                           parameters
//   adam_m/<model>/<path>, adam_v/…          moments of the trainable ones
//   ema/<model>/<path>                       with ema_decay > 0
// Beside the state: key u32 [2] of the run's seed, and the task's batch. Out: state, loss, grad_norm, learning_rate.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/optim/optimizer.h"
#include "maxdiffusion/tasks/task.h"

namespace md {

struct StepGraph {
  std::unique_ptr<Graph> graph;
  ParamTable params;
  std::vector<BatchField> fields;
  double flops = 0;  // of one step on all devices: three times the loss's matrix products
};

/// A step whose loss or gradient norm is not finite changes nothing but `healthy`, and neither do the steps after it:
/// the state stays what it was before the bad step.
StepGraph trace_step(const Task& task, const GraphOptions& options, const ScopeOptions& scope, const OptimConfig& optim,
                     double ema_decay);

}  // namespace md
