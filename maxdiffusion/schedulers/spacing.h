// Timesteps of inference steps (timestep_spacing). Source: Lin et al. 2023, "Common diffusion noise schedules and
// sample steps are flawed", table 2.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

/// Throws invalid_config unless steps is in [1, T].
void check_steps(int64_t steps, int64_t T);

/// `steps` timesteps, descending, in [0, T):
///   linspace  T−1 … 0 evenly, fractional      (T−1 alone for one step)
///   leading   multiples of T div steps, plus `offset`, at most T−1
///   trailing  round(T, T − T/steps, …) − 1    (half to even)
/// Throws invalid_config on another spacing and on steps outside [1, T].
std::vector<double> spaced_timesteps(const std::string& spacing, int64_t steps, int64_t T, int64_t offset);

/// spaced_timesteps() rounded to whole numbers (half to even).
std::vector<double> integer_timesteps(const std::string& spacing, int64_t steps, int64_t T, int64_t offset);

/// Timesteps of DPM-Solver and UniPC: whole, and for linspace and leading the first `steps` of steps + 1, because the
/// last step ends without noise. Only timesteps below `end` are used (T: all); trailing keeps its stride T/steps, so
/// there may be fewer. Also throws invalid_config if a timestep repeats.
std::vector<double> multistep_timesteps(const std::string& spacing, int64_t steps, int64_t T, int64_t offset,
                                        int64_t end);

}  // namespace md
