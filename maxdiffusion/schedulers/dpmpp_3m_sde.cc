// DPM-Solver++ for the reverse SDE, multistep of order 3: an exponential integrator in log σ with differences of the
// last predictions of x0 as derivatives; noise is added at each step but the last. diffusers has no such sampler (its
// sde-dpmsolver++ of order 3 has another third term); the class name is this program's.
// Sources: Lu et al. 2022b, appendix on SDEs; k-diffusion (η = 1).

#include <algorithm>
#include <cmath>

#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kDpmpp3mSde = "DPMSolver3MSDEScheduler";

std::unique_ptr<Scheduler> make_dpmpp_3m_sde(const nlohmann::json& config) {
  auto plan = [grid = grid_to_zero(config)](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.spaced(steps);
    LinearPlan p{.timesteps = l.timesteps, .steps = {}, .init_noise_sigma = sigma_init_noise(grid, l)};
    for (size_t i = 0; i < l.timesteps.size(); ++i) {
      const double s = l.sigmas[i], to = l.sigmas[i + 1];
      const Form x0 = k.sample - s * sigma_derivative(grid.noise.prediction_type, s, k);
      const Form &last = k.history[0], &second_last = k.history[1];
      LinearStep step{.level = {1, s}, .input_scale = sigma_input_scale(s), .x0 = {}, .next = {x0, x0, last}};
      if (to > 0 && to < s) {
        const double h = std::log(s / to), u = 2 * h;
        Form& next = step.next[0];
        next = std::exp(-u) * k.sample - std::expm1(-u) * x0;
        const double phi2 = std::expm1(-u) / u + 1, phi3 = phi2 / u - 0.5;
        const size_t known = std::min<size_t>(k.before(i), 2);
        auto width = [&](size_t back) { return std::log(l.sigmas[i - back] / l.sigmas[i - back + 1]) / h; };
        if (known > 0) {
          const double r0 = width(1);
          Form slope = (x0 - last) / r0;
          if (known > 1) {
            const double r1 = width(2);
            const Form curve = (slope - (last - second_last) / r1) / (r0 + r1);
            slope += r0 * curve;
            next -= phi3 * curve;
          }
          next += phi2 * slope;
        }
        step.noise = to * std::sqrt(-std::expm1(-u));
      }
      p.steps.push_back(step);
    }
    return p;
  };
  return linear_sampler({.name = kDpmpp3mSde, .history = 2, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass dpmpp_3m_sde_sampler() {
  return {.name = kDpmpp3mSde,
          .make = make_dpmpp_3m_sde,
          .words = {{.word = "dpmpp_3m_sde", .aliases = {"dpmpp_3m_sde_gpu"}},
                    {"dpmpp_3m_sde_karras", {{"use_karras_sigmas", true}}},
                    {"dpmpp_3m_sde_exponential", {{"use_exponential_sigmas", true}}}}};
}

}  // namespace md
