// Ratios for MagCache: how much the norm of the sum that the blocks add changes from step to step, for the published
// Wan models. Measured by the authors of MagCache (Ma et al. 2025) and, for 2.2 T2V, MaxDiffusion.
#pragma once

#include <vector>

#include "maxdiffusion/models/wan_transformer.h"

namespace md {

struct WanUse {
  bool two_transformers = false, image = false;  // two_transformers: of the folder; image: of this sampling
  int64_t height = 0;                            // pixels
};

/// Two ratios, with and without prompt, for each of the steps that were measured (40 or 50); empty for a model that was
/// not measured.
std::vector<double> wan_magcache_ratios(const WanTransformerConfig& config, const WanUse& use);
/// For use_teacache, of Wan 2.1: the polynomials of the change of the timestep's projection, fitted by TeaCache's
/// authors (Liu et al. 2024); empty: none was fitted.
std::vector<double> wan_teacache_coefficients(const WanTransformerConfig& config, const WanUse& use);

}  // namespace md
