// CFG++: interpolates from the prediction without the prompt to that with it by cfg_pp_lambda. The new sample gets the
// noise of the prediction without the prompt, which samplers add if their steps are sums of x0 and noise
// (SampleTable::renoise). Source: Chung et al. 2024 (CFG++), algorithm 2.
#include "maxdiffusion/pipelines/guidance/method.h"

namespace md {

GuidanceMethod cfg_pp_guidance() {
  return {.name = "cfg_pp", .combine = [](const GuidanceKeys& keys, Tensor, Tensor negative, Tensor positive, Tensor) {
            return Guided{negative + (positive - negative) * keys.cfg_pp_lambda, {}};
          }};
}

}  // namespace md
