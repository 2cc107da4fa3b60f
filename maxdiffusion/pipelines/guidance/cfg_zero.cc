// CFG-Zero*: scales the prediction without the prompt to fit that with it; the first steps predict zero.
// Source: Fan et al. 2025.
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/pipelines/guidance/method.h"

namespace md {
namespace {

Guided combine(const GuidanceKeys&, Tensor scale, Tensor negative, Tensor positive, Tensor) {
  Tensor fitted = negative * (total_of_sample(positive * negative) / (total_of_sample(square(negative)) + 1e-8));
  return {fitted + scaled(positive - fitted, scale), {}};
}

Tensor finish(const GuidanceKeys& keys, Tensor prediction, Tensor step) {
  if (keys.cfg_zero_init_steps == 0) return prediction;
  Tensor first = lt(step, constant(step.graph(), static_cast<double>(keys.cfg_zero_init_steps), step.dtype()));
  return where(broadcast_to(first, prediction.dims()), zeros_like(prediction), prediction);
}

}  // namespace

GuidanceMethod cfg_zero_guidance() { return {.name = "cfg_zero", .combine = combine, .finish = finish}; }

}  // namespace md
