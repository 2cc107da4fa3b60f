// Restart: Heun's method down to a low level; noise brings the sample back up to a higher one, and the steps between
// the two are repeated. With fewer than 20 steps it is Heun's method; from 20 steps levels are those of Karras,
// whatever sigma_schedule says. Sources: Xu et al. 2023; the numbers of steps, levels and repetitions are
// AUTOMATIC1111's.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/schedulers/heun.h"
#include "maxdiffusion/schedulers/midpoint.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr const char* kRestart = "RestartScheduler";
constexpr double kLow = 0.1, kHigh = 2;  // σ between which steps are repeated

size_t nearest(const std::vector<double>& sigmas, double sigma) {
  const auto distance = [sigma](double s) { return std::abs(s - sigma); };
  return static_cast<size_t>(std::ranges::min_element(sigmas, {}, distance) - sigmas.begin());
}

std::vector<HeunStep> restart_steps(const SigmaGrid& grid, const SigmaLevels& levels) {
  const auto n = static_cast<int64_t>(levels.timesteps.size());
  if (n < 20) return heun_steps(levels);
  const int64_t repeated = n < 36 ? 9 : n / 4, times = n < 36 ? 1 : 2;
  const auto along = [&grid](SigmaLevels l) {
    for (size_t i = 0; i + 1 < l.sigmas.size(); ++i) l.timesteps.push_back(grid.timestep_of(l.sigmas[i]));
    return l;
  };
  SigmaLevels main{.timesteps = {},
                   .sigmas = levels_between("karras", levels.sigmas[0], levels.sigmas[static_cast<size_t>(n - 1)],
                                            n - repeated * times)};
  main.sigmas.push_back(0);
  main = along(main);
  const size_t low = nearest(main.sigmas, kLow), high = nearest(main.sigmas, kHigh);
  if (high >= low || low + 1 >= main.sigmas.size()) return heun_steps(levels);

  SigmaLevels again{.timesteps = {},
                    .sigmas = levels_between("karras", main.sigmas[high], main.sigmas[low], repeated + 1)};
  std::vector<HeunStep> steps = heun_steps(main), repeat = heun_steps(along(again));
  repeat.back().next_timestep = main.timesteps[low];
  const double noise = std::sqrt(std::pow(main.sigmas[high], 2) - std::pow(main.sigmas[low], 2));
  std::vector<HeunStep> all(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(low));
  for (int64_t i = 0; i < times; ++i) {
    all.back().noise = noise;
    all.insert(all.end(), repeat.begin(), repeat.end());
  }
  all.insert(all.end(), steps.begin() + static_cast<std::ptrdiff_t>(low), steps.end());
  return all;
}

std::unique_ptr<Scheduler> make_restart(const nlohmann::json& config) {
  auto plan = [grid = grid_to_zero(config)](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.spaced(steps);
    LinearPlan p = heun_plan(grid, restart_steps(grid, l), 0, k);
    p.init_noise_sigma = sigma_init_noise(grid, l);
    return p;
  };
  return linear_sampler({.name = kRestart, .history = 2, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass restart_sampler() { return {.name = kRestart, .make = make_restart, .words = {{.word = "restart"}}}; }

}  // namespace md
