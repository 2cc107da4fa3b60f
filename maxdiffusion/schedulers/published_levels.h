// Noise levels σ that were published as tables, for models with Stable Diffusion's noise (ays_svd: Stable Video
// Diffusion's). Sources: Sabour et al. 2024, "Align Your Steps" (ays_sd15, ays_sdxl, ays_svd); Chen et al. 2024,
// "On the Trajectory Regularity of ODE-based Diffusion Sampling" (gits, with coefficient 1.2).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

/// Whether this value of sigma_schedule is such a table.
bool is_published(const std::string& kind);
/// `n` levels, without the final one. Levels for numbers of steps that have no table are interpolated linearly in the
/// logarithms of the table's levels.
std::vector<double> published_levels(const std::string& kind, int64_t n);

}  // namespace md
