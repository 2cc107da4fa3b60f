// Which training timesteps a sampler visits. Source: Lin et al. 2023, "Common diffusion noise schedules and sample
// steps are flawed", table 2.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

/// `steps` timesteps, descending, in [0, T):
///   linspace  T−1 … 0 evenly, fractional      (T−1 alone for one step)
///   leading   multiples of T div steps, plus `offset`, at most T−1
///   trailing  round(T, T − T/steps, …) − 1    (half to even)
/// Throws invalid_config on another spacing and on steps outside [1, T].
std::vector<double> spaced_timesteps(const std::string& spacing, int64_t steps, int64_t T, int64_t offset);

}  // namespace md
