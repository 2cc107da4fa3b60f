// How much the size of what the blocks of the published Wan models add changes from step to step, as measured by the
// authors of MagCache (Ma et al. 2025) and, for 2.2 T2V, MaxDiffusion.
#pragma once

#include <vector>

#include "maxdiffusion/models/wan_transformer.h"

namespace md {

struct WanUse {
  bool two_transformers = false, image = false;  // of a folder; of this sampling
  int64_t height = 0;                            // pixels
};

/// Two ratios for each of the steps that were measured (40 or 50), with prompt and without; empty for a model that was
/// not measured.
std::vector<double> wan_magcache_ratios(const WanTransformerConfig& config, const WanUse& use);

}  // namespace md
