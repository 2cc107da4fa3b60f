// Diffusion exponential integrator sampler, multistep: x/α is the integral of the noise over ρ = σ/α, approximated by a
// polynomial in log ρ through the last predictions.
// Source: Zhang and Chen 2023, section 4 (ρAB in log ρ).

#include <algorithm>
#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kDeis = "DEISMultistepScheduler";

/// ∫ from a to b of Π_{j ≠ which} (log t − log n_j) / (log n_which − log n_j) dt, for at most three nodes.
double log_basis_integral(const std::vector<double>& nodes, size_t which, double a, double b) {
  // The polynomial c0 + c1·l + c2·l² in l = log t, integrated by ∫l = t(l − 1) and ∫l² = t(l² − 2l + 2).
  double c[3] = {1, 0, 0};
  for (size_t j = 0; j < nodes.size(); ++j) {
    if (j == which) continue;
    const double root = std::log(nodes[j]), scale = 1 / (std::log(nodes[which]) - root);
    for (int i = 2; i >= 0; --i) c[i] = scale * ((i > 0 ? c[i - 1] : 0) - root * c[i]);
  }
  auto primitive = [&](double t) {
    const double l = std::log(t);
    return t * (c[0] + c[1] * (l - 1) + c[2] * (l * l - 2 * l + 2));
  };
  return primitive(b) - primitive(a);
}

std::unique_ptr<Scheduler> make_deis(const nlohmann::json& config) {
  require_off(config, {"use_lu_lambdas"});
  SigmaGrid grid = SigmaGrid::from_json(config);
  grid.flow_from_one = false;
  grid.ends_at_zero = false;
  // Names of other solvers' settings mean the default, as in diffusers.
  choice(config, "algorithm_type", "deis", {"deis", "dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++"});
  choice(config, "solver_type", "logrho", {"logrho", "midpoint", "heun", "bh1", "bh2"});
  const auto order = field<int64_t>(config, "solver_order", 2);
  check(order >= 1 && order <= 3, Code::invalid_config, "scheduler config: solver_order is {}; expected 1, 2 or 3",
        order);
  const bool low_at_end = field(config, "lower_order_final", true);

  auto plan = [=](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.multistep(steps);
    const auto levels = snr_levels(l, grid.flow);
    const size_t n = l.timesteps.size();
    LinearPlan p{.timesteps = l.timesteps, .steps = {}};
    for (size_t i = 0; i < n; ++i) {
      const SnrLevel &s = levels[i], &t = levels[i + 1];
      const Form x0 = predicted_x0(grid.noise.prediction_type, s.alpha, s.sigma, k);
      std::vector<Form> m = {(k.sample - s.alpha * x0) / s.sigma};  // noise, newest first
      m.insert(m.end(), k.history.begin(), k.history.end());
      size_t now = std::min(static_cast<size_t>(order), k.before(i) + 1);
      if (low_at_end && n < 15) now = std::min(now, n - i);
      std::vector<double> rho;
      for (size_t j = 0; j < now; ++j) rho.push_back(levels[i - j].sigma / levels[i - j].alpha);
      Form next = k.sample / s.alpha;
      for (size_t j = 0; j < now; ++j) next += log_basis_integral(rho, j, rho[0], t.sigma / t.alpha) * m[j];
      LinearStep step{.level = {s.alpha, s.sigma}, .x0 = {}, .next = {t.alpha * next}};
      step.next.insert(step.next.end(), m.begin(), m.end() - 1);
      p.steps.push_back(step);
    }
    return p;
  };
  return linear_sampler({.name = kDeis, .history = order - 1, .plan = plan});
}

}  // namespace

SamplerClass deis_sampler() {
  return {.name = kDeis,
          .make = make_deis,
          .words = {{"deis"}, {"deis_karras", {{"use_karras_sigmas", true}}}},
          .fields = {"algorithm_type", "solver_type", "solver_order", "lower_order_final"},
          .models = SamplerClass::noise_or_flow,
          .shift = "flow_shift"};
}

}  // namespace md
