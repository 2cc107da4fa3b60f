// Optimizers and learning-rate schedules as graph functions. Source: Loshchilov and Hutter 2019 (AdamW); schedules have
// the names and formulas of diffusers' `optimization`.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

struct OptimConfig {
  double learning_rate = 1e-5;
  bool scale_lr = false;
  int64_t max_train_steps = 1500;
  int64_t learning_rate_schedule_steps = -1;  // -1: max_train_steps
  double warmup_steps_fraction = 0.1;
  std::string lr_scheduler = "constant_with_warmup";
  double lr_num_cycles = 1, lr_power = 1;
  double adam_b1 = 0.9, adam_b2 = 0.999, adam_eps = 1e-8, adam_weight_decay = 1e-2;
  double max_grad_norm = 1.0;   // ≤ 0: no clipping
  double max_grad_value = 1.0;  // ≤ 0: no clipping
  bool opt_enable_grad_clipping = false, opt_enable_grad_global_norm_clipping = false;
  std::string low_precision_update = "master";

  /// A copy in which max_grad_value and max_grad_norm are 0 where their switches are off. `always_by_norm`: clipping by
  /// norm needs no switch.
  OptimConfig with_switches(bool always_by_norm) const;
  template <class V>
  void visit(V&& v) {
    v("learning_rate", learning_rate, "peak step size");
    v("scale_lr", scale_lr, "multiply the learning rate by the global batch size");
    v("max_train_steps", max_train_steps, "optimizer updates");
    v("learning_rate_schedule_steps", learning_rate_schedule_steps, "length of the schedule; -1: max_train_steps");
    v("warmup_steps_fraction", warmup_steps_fraction, "part of the schedule spent warming up");
    v("lr_scheduler", lr_scheduler,
      "constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial (diffusers' formulas)");
    v("lr_num_cycles", lr_num_cycles, "restarts of cosine_with_restarts");
    v("lr_power", lr_power, "exponent of polynomial");
    v("adam_b1", adam_b1, "decay of the first moment");
    v("adam_b2", adam_b2, "decay of the second moment");
    v("adam_eps", adam_eps, "added outside the root");
    v("adam_weight_decay", adam_weight_decay, "decoupled weight decay");
    v("max_grad_norm", max_grad_norm,
      "clip the global norm of the gradients to this; <= 0: off; SDXL: with opt_enable_grad_global_norm_clipping");
    v("max_grad_value", max_grad_value, "clip each gradient element to this, with opt_enable_grad_clipping");
    v("opt_enable_grad_clipping", opt_enable_grad_clipping, "clip by max_grad_value");
    v("opt_enable_grad_global_norm_clipping", opt_enable_grad_global_norm_clipping, "clip by max_grad_norm");
    v("low_precision_update", low_precision_update,
      "weights_dtype narrower than float32: master (a float32 copy is updated), stochastic (updated weights are "
      "rounded at random) or plain (to nearest: small updates are lost)");
  }
};

/// Learning rate of update number `step` (scalar s32, from 0), f32 scalar.
Tensor learning_rate(const OptimConfig& config, Tensor step);
/// The learning rate computed on the host.
double learning_rate(const OptimConfig& config, int64_t step);

struct Update {
  std::vector<Tensor> params, first_moments, second_moments, averages;  // as given, f32
  Tensor grad_norm;                                                     // f32 scalar, before clipping
  Tensor applied;  // pred scalar: the norm is finite, and `healthy` is true
};
/// Exponential moving averages of the parameters, f32: average ← param + (average − param)·keep, with the new param.
struct MovingAverages {
  std::vector<Tensor> values;  // of every parameter, or empty
  Tensor keep;                 // f32 scalar
};
/// AdamW with clipping by value, then by global norm. `step` counts from 0. Parameters and moments are f32, gradients
/// of any float type. `updates`: number of this update of these parameters, where it is another than `step`, which the
/// learning rate follows. An empty gradient leaves its parameter, moments and average unchanged; a norm that is not
/// finite, or a false `healthy` (pred scalar; empty: true), leaves all of them unchanged.
Update adamw(const OptimConfig& config, Tensor step, const std::vector<Tensor>& params,
             const std::vector<Tensor>& grads, const std::vector<Tensor>& first, const std::vector<Tensor>& second,
             Tensor healthy = {}, Tensor updates = {}, const MovingAverages& averages = {});

}  // namespace md
