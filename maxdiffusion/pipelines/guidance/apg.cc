// Adaptive projected guidance: limits the norm of the predictions' difference and scales its part that is parallel to
// the prediction. Source: Sadat et al. 2024; details as in diffusers' AdaptiveProjectedGuidance.
#include "maxdiffusion/pipelines/guidance/method.h"

namespace md {
namespace {

Guided combine(const GuidanceKeys& keys, Tensor scale, Tensor negative, Tensor positive, Tensor momentum) {
  Tensor difference = positive - negative, momentum_out;
  if (keys.has_momentum()) momentum_out = difference = difference + momentum * keys.apg_momentum;
  if (keys.apg_norm_threshold > 0) {
    Tensor norm = sqrt(total_of_sample(square(difference)));
    Tensor most = full(norm.graph(), keys.apg_norm_threshold, norm.shape());
    difference = difference * where(gt(norm, most), most / norm, full(norm.graph(), 1, norm.shape()));
  }
  // The part parallel to the prediction with the prompt.
  Tensor parallel = positive * (total_of_sample(difference * positive) / total_of_sample(square(positive)));
  return {negative + scaled(difference + parallel * (keys.apg_eta - 1), scale), momentum_out};
}

}  // namespace

GuidanceMethod apg_guidance() { return {.name = "apg", .combine = combine}; }

}  // namespace md
