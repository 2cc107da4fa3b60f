// Classifier-free guidance. Source: Ho and Salimans 2022, equation 6.
#include "maxdiffusion/pipelines/guidance/method.h"

namespace md {

GuidanceMethod cfg_guidance() {
  return {.name = "cfg", .combine = [](const GuidanceKeys&, double scale, Tensor negative, Tensor positive, Tensor) {
            return Guided{negative + (positive - negative) * scale, {}};
          }};
}

}  // namespace md
