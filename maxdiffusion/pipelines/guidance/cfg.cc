// Classifier-free guidance. Source: Ho and Salimans 2022, equation 6.
#include "maxdiffusion/pipelines/guidance/method.h"

namespace md {

GuidanceMethod cfg_guidance() {
  return {.name = "cfg", .combine = [](const GuidanceKeys&, Tensor scale, Tensor negative, Tensor positive, Tensor) {
            return Guided{negative + scaled(positive - negative, scale), {}};
          }};
}

}  // namespace md
