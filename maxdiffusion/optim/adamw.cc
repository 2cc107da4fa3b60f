// AdamW: decoupled weight decay, bias-corrected moments, clipping by value and then by global norm.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {
namespace {

/// 1 − b^(step+1). Through expm1: for b near 1 and small steps the difference would lose most digits in f32.
Tensor bias_correction(double b, Tensor step) { return -expm1((step + 1.0) * std::log(b)); }

/// Scalars of one update, shared by all parameters.
struct Scalars {
  Tensor lr, correction1, correction2, clip;  // clip: factor on every gradient, empty: none
};

struct Moved {
  Tensor param, first, second;
};

Moved update_one(const OptimConfig& c, const Scalars& s, Tensor p, Tensor g, Tensor m, Tensor v) {
  const DType p_type = p.dtype(), m_type = m.dtype(), v_type = v.dtype();
  p = cast(p, DType::f32);
  if (s.clip) g = g * s.clip;
  m = cast(m, DType::f32) * c.adam_b1 + g * (1 - c.adam_b1);
  v = cast(v, DType::f32) * c.adam_b2 + square(g) * (1 - c.adam_b2);
  Tensor direction = (m / s.correction1) / (sqrt(v / s.correction2) + c.adam_eps);
  if (c.adam_weight_decay != 0) direction = direction + p * c.adam_weight_decay;
  return {cast(p - direction * s.lr, p_type), cast(m, m_type), cast(v, v_type)};
}

}  // namespace

Update adamw(const OptimConfig& config, Tensor step, const std::vector<Tensor>& params,
             const std::vector<Tensor>& grads, const std::vector<Tensor>& first, const std::vector<Tensor>& second) {
  check(params.size() == grads.size() && params.size() == first.size() && params.size() == second.size(),
        Code::internal, "adamw: {} parameters, {} gradients, {} first and {} second moments", params.size(),
        grads.size(), first.size(), second.size());
  Update out{params, first, second, {}};
  Tensor k = cast(step, DType::f32);
  std::vector<Tensor> g(grads.size()), live;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i]) continue;
    check(grads[i].dims() == params[i].dims(), Code::invalid_graph, "adamw: gradient {} for a parameter {}",
          to_string(grads[i].shape()), to_string(params[i].shape()));
    live.push_back(g[i] = cast(grads[i], DType::f32));
  }
  if (live.empty()) {
    out.grad_norm = constant(step.graph(), 0.0);
    return out;
  }
  out.grad_norm = sqrt(sum_of_squares(live));

  Scalars s{learning_rate(config, step), bias_correction(config.adam_b1, k), bias_correction(config.adam_b2, k), {}};
  Tensor norm = out.grad_norm;
  if (config.max_grad_value > 0) {
    live.clear();
    for (Tensor& x : g)
      if (x) live.push_back(x = clamp(x, -config.max_grad_value, config.max_grad_value));
    norm = sqrt(sum_of_squares(live));
  }
  if (config.max_grad_norm > 0) s.clip = minimum(config.max_grad_norm / norm, scalar_like(norm, 1.0));
  for (size_t i = 0; i < params.size(); ++i) {
    if (!g[i]) continue;
    const Moved moved = update_one(config, s, params[i], g[i], first[i], second[i]);
    out.params[i] = moved.param;
    out.first_moments[i] = moved.first;
    out.second_moments[i] = moved.second;
  }
  return out;
}

}  // namespace md
