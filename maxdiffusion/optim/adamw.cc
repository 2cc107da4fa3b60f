// AdamW: decoupled weight decay, bias-corrected moments, clipping by value and then by global norm; moving averages as
// diffusers' EMAModel keeps them.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/gradient_norm.h"
#include "maxdiffusion/optim/kernel_call.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {
namespace {

/// 1 − b^(step+1). Through expm1: for b near 1 and small steps the difference would lose most digits in f32.
Tensor bias_correction(double b, Tensor step) { return -expm1((step + 1.0) * std::log(b)); }

/// Scalars of one update, shared by all parameters.
struct Scalars {
  Tensor lr, correction1, correction2, clip, applied;  // clip: factor on every gradient, empty: none
  Tensor keep;                                         // of averages, empty: none
};

struct Moved {
  Tensor param, first, second, average;  // average: empty where there is none
};

Moved update_one(const OptimConfig& c, const Scalars& s, const Moved& before, Tensor g) {
  auto [p, m, v, average] = before;
  if (s.clip) g = g * s.clip;
  m = m * c.adam_b1 + g * (1 - c.adam_b1);
  v = v * c.adam_b2 + square(g) * (1 - c.adam_b2);
  Tensor direction = (m / s.correction1) / (sqrt(v / s.correction2) + c.adam_eps);
  if (c.adam_weight_decay != 0) direction = direction + p * c.adam_weight_decay;
  p = p - direction * s.lr;
  if (average) average = where(s.applied, p + (average - p) * s.keep, average);
  return {where(s.applied, p, before.param), where(s.applied, m, before.first), where(s.applied, v, before.second),
          average};
}

/// The update by calls of the CPU kernel: for a UNet's thousand parameters, XLA's own code costs tens of seconds of
/// compilation.
void update_by_kernel(const OptimConfig& c, const Scalars& s, const std::vector<Tensor>& grads, Update& out) {
  const Tensor factor = s.clip ? s.clip : scalar_like(s.lr, 1.0);
  const Tensor keep = s.keep ? s.keep : scalar_like(s.lr, 1.0);
  const Tensor rates = stack({s.lr, s.correction1, s.correction2, factor, cast(s.applied, DType::f32), keep}, 0);
  const std::vector<DimAxes> all_axes = axes_of_inputs(out.first_moments);
  const std::string config = fmt::format(
      "b1 = {:.17e} : f64, b2 = {:.17e} : f64, eps = {:.17e} : f64, weight_decay = {:.17e} : f64, max_value = "
      "{:.17e} : f64, averages = {} : i64",
      c.adam_b1, c.adam_b2, c.adam_eps, c.adam_weight_decay, c.max_grad_value, out.averages.empty() ? 0 : 1);
  std::vector<std::vector<Tensor>*> lists = {&out.params, &out.first_moments, &out.second_moments};
  if (!out.averages.empty()) lists.push_back(&out.averages);
  std::vector<size_t> live;
  for (size_t i = 0; i < grads.size(); ++i)
    if (grads[i]) live.push_back(i);
  for (size_t from = 0; from < live.size(); from += kPerCall) {
    const size_t to = std::min(live.size(), from + kPerCall), n = to - from;
    std::vector<Tensor> operands = {rates};
    std::vector<DimAxes> axes = {{}};
    std::vector<Tensor*> outputs;
    for (size_t i = from; i < to; ++i) operands.push_back(grads[live[i]]), axes.push_back(all_axes[live[i]]);
    for (auto* list : lists)
      for (size_t i = from; i < to; ++i) {
        operands.push_back((*list)[live[i]]);
        axes.push_back(all_axes[live[i]]);
        outputs.push_back(&(*list)[live[i]]);
      }
    const std::vector<DimAxes> of_results(axes.begin() + 1 + static_cast<std::ptrdiff_t>(n), axes.end());
    const auto results = each_part(operands, axes, of_results, [&](const std::vector<Tensor>& part) {
      CustomCall call{.target = kAdamwKernel, .results = {}, .backend_config = config};
      for (size_t i = 1 + n; i < part.size(); ++i) {
        call.in_place.emplace_back(static_cast<int>(call.results.size()), static_cast<int>(i));
        call.results.push_back(part[i].shape());
      }
      return custom_call(part[0].graph(), part, call);
    });
    for (size_t i = 0; i < outputs.size(); ++i) *outputs[i] = results[i];
  }
}

}  // namespace

Update adamw(const OptimConfig& config, Tensor step, const std::vector<Tensor>& params,
             const std::vector<Tensor>& grads, const std::vector<Tensor>& first, const std::vector<Tensor>& second,
             Tensor healthy, Tensor updates, const MovingAverages& averages) {
  check(params.size() == grads.size() && params.size() == first.size() && params.size() == second.size(),
        Code::internal, "adamw: {} parameters, {} gradients, {} first and {} second moments", params.size(),
        grads.size(), first.size(), second.size());
  check(averages.values.empty() || averages.values.size() == params.size(), Code::internal,
        "adamw: {} averages of {} parameters", averages.values.size(), params.size());
  Update out{params, first, second, averages.values, {}, {}};
  Tensor k = cast(updates ? updates : step, DType::f32);
  std::vector<Tensor> g(grads.size()), live, moments;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i]) continue;
    check(grads[i].dims() == params[i].dims(), Code::invalid_graph, "adamw: gradient {} for a parameter {}",
          to_string(grads[i].shape()), to_string(params[i].shape()));
    for (Tensor t : {params[i], first[i], second[i], averages.values.empty() ? params[i] : averages.values[i]})
      check(t.dtype() == DType::f32, Code::internal, "adamw: a parameter, moment or average is {}; expected f32",
            to_string(t.shape()));
    live.push_back(g[i] = cast(grads[i], DType::f32));
    moments.push_back(first[i]);
  }
  if (live.empty()) {
    out.grad_norm = constant(step.graph(), 0.0);
    out.applied = healthy ? healthy : is_finite(out.grad_norm);
    return out;
  }
  const bool kernel = kernels_take_parts(live);
  const GradientSquares squares = gradient_squares(live, axes_of_inputs(moments), config.max_grad_value);
  out.grad_norm = sqrt(squares.as_given);
  const Tensor norm = sqrt(squares.limited);
  if (!kernel && config.max_grad_value > 0)
    for (Tensor& t : g)
      if (t) t = clamp(t, -config.max_grad_value, config.max_grad_value);
  Scalars s{learning_rate(config, step),
            bias_correction(config.adam_b1, k),
            bias_correction(config.adam_b2, k),
            {},
            {},
            averages.keep};
  out.applied = s.applied = healthy ? bit_and(healthy, is_finite(out.grad_norm)) : is_finite(out.grad_norm);
  if (config.max_grad_norm > 0) s.clip = minimum(config.max_grad_norm / norm, scalar_like(norm, 1.0));
  if (kernel) {
    update_by_kernel(config, s, g, out);
    return out;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    if (!g[i]) continue;
    const Tensor average = out.averages.empty() ? Tensor() : out.averages[i];
    const Moved moved = update_one(config, s, {params[i], first[i], second[i], average}, g[i]);
    out.params[i] = moved.param;
    out.first_moments[i] = moved.first;
    out.second_moments[i] = moved.second;
    if (average) out.averages[i] = moved.average;
  }
  return out;
}

}  // namespace md
