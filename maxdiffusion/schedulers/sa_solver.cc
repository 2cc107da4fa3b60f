// Stochastic Adams: predictor and corrector of any order for the reverse SDE, in half the log SNR λ. Adds noise at
// timesteps 200 to 800 (τ = 1), as in diffusers by default; elsewhere it is an ODE solver (τ = 0).
// Source: Xue et al. 2023, equations 14, 15 and 17; the terms of order 2 are those of its appendix for few steps.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kSaSolver = "SASolverScheduler";

/// ∫ from −h to 0 of e^{c·u}·Π_{j ≠ which} (u − n_j) / (n_which − n_j) du, c ≠ 0.
double weighted_basis_integral(const std::vector<double>& nodes, size_t which, double c, double h) {
  std::vector<double> poly = {1};  // coefficients of u^i
  for (size_t j = 0; j < nodes.size(); ++j) {
    if (j == which) continue;
    const double scale = 1 / (nodes[which] - nodes[j]);
    poly.push_back(0);
    for (size_t i = poly.size(); i-- > 0;) poly[i] = scale * ((i > 0 ? poly[i - 1] : 0) - nodes[j] * poly[i]);
  }
  // By parts: I_i = ∫ u^i e^{cu} = [u^i e^{cu} / c] − i/c · I_{i−1}.
  double sum = 0, part = -std::expm1(-c * h) / c, power = 1;
  for (size_t i = 0; i < poly.size(); ++i) {
    if (i > 0) power *= -h, part = -power * std::exp(-c * h) / c - static_cast<double>(i) / c * part;
    sum += poly[i] * part;
  }
  return sum;
}

struct SaSolver {
  bool data;  // predictions are x0, else noise

  /// The sample at levels[from + 1] without its noise, from `x` at levels[from]. Predictions m are at consecutive
  /// levels, newest first, as many as the order; the first is at from (predictor) or from + 1 (corrector).
  Form update(const std::vector<SnrLevel>& levels, size_t from, const Form& x, size_t newest,
              const std::vector<Form>& m, double tau) const {
    const SnrLevel &s = levels[from], &t = levels[from + 1];
    const double h = t.lambda - s.lambda, c = data ? 1 + tau * tau : -1;
    std::vector<double> nodes;
    for (size_t j = 0; j < m.size(); ++j) nodes.push_back(levels[newest - j].lambda - t.lambda);
    Form next = (data ? std::exp(-tau * tau * h) * t.sigma / s.sigma : t.alpha / s.alpha) * x;
    // For data predictions e^{λ_t}·σ_t = α_t, for noise e^{−λ_t}·α_t = σ_t.
    const double scale = (1 + tau * tau) * (data ? t.alpha : -t.sigma);
    std::vector<double> weights;
    for (size_t j = 0; j < m.size(); ++j) weights.push_back(weighted_basis_integral(nodes, j, c, h));
    if (data && m.size() == 2 && h != 0) {
      const double rest = (h * c - 1 + std::exp(-c * h)) / (c * c);
      const double correction =
          newest > from ? h / 2 - rest / h : (h * h / 2 - rest) / (s.lambda - levels[from - 1].lambda);
      weights[0] += correction, weights[1] -= correction;
    }
    for (size_t j = 0; j < m.size(); ++j) next += scale * weights[j] * m[j];
    return next;
  }

  double noise(const SnrLevel& s, const SnrLevel& t, double tau) const {
    const double h = t.lambda - s.lambda;
    return t.sigma * (data ? std::sqrt(-std::expm1(-2 * tau * tau * h)) : tau * std::sqrt(std::expm1(2 * h)));
  }
};

std::unique_ptr<Scheduler> make_sa_solver(const nlohmann::json& config) {
  require_off(config, {"use_lu_lambdas"});
  SigmaGrid grid = SigmaGrid::from_json(config);
  grid.flow_from_one = false;
  grid.ends_at_zero = false;
  const std::string type = grid.noise.prediction_type;
  // Names of other solvers' settings mean the default.
  const auto algorithm = choice(
      config, "algorithm_type", "data_prediction",
      {"data_prediction", "noise_prediction", "dpmsolver++", "dpmsolver", "sde-dpmsolver", "sde-dpmsolver++", "deis"});
  const SaSolver solver{.data = algorithm != "noise_prediction"};
  auto order_of = [&](const char* name) {
    const auto order = field<int64_t>(config, name, 2);
    check(order >= 1 && order <= 4, Code::invalid_config, "scheduler config: {} is {}; expected 1 to 4", name, order);
    return static_cast<size_t>(order);
  };
  const size_t predictor = order_of("predictor_order"), corrector = order_of("corrector_order"),
               retained = std::max(predictor, corrector - 1);
  check(solver.data || type != "flow_prediction", Code::invalid_config,
        "scheduler config: prediction_type is flow_prediction, which needs algorithm_type data_prediction");
  const bool low_at_end = field(config, "lower_order_final", true);
  grid.clip_lambda(config);

  auto plan = [=](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.multistep(steps);
    const auto levels = snr_levels(l, grid.flow);
    const size_t n = l.timesteps.size();
    auto tau = [&](size_t i) { return l.timesteps[i] >= 200 && l.timesteps[i] <= 800 ? 1.0 : 0.0; };
    LinearPlan p{.timesteps = l.timesteps, .steps = {}};
    // Carried: the last step's corrected sample, its prediction without noise, and predictions, newest first.
    const Form &last = k.history[0], &silent = k.history[1];
    size_t correcting = 0;
    for (size_t i = 0; i < n; ++i) {
      const SnrLevel& s = levels[i];
      std::vector<Form> m = {solver.data ? predicted_x0(type, s.alpha, s.sigma, k)
                                         : predicted_noise(type, s.alpha, s.sigma, k)};
      m.insert(m.end(), k.history.begin() + 2, k.history.end());
      auto newest = [&](size_t count) { return std::vector<Form>(m.begin(), m.begin() + static_cast<int64_t>(count)); };
      // The corrector adds the same noise as the predictor.
      const Form x =
          k.before(i) == 0
              ? k.sample
              : Form(solver.update(levels, i - 1, last, i, newest(correcting), tau(i - 1)) + (k.sample - silent));
      size_t predicting = predictor;
      correcting = corrector;
      if (low_at_end) predicting = std::min(predicting, n - i), correcting = std::min(correcting, n - i + 1);
      predicting = std::min(predicting, std::min(k.before(i), retained) + 1),
      correcting = std::min(correcting, std::min(k.before(i), retained) + 2);
      const Form next = solver.update(levels, i, x, i, newest(predicting), tau(i));
      LinearStep step{.level = {s.alpha, s.sigma},
                      .x0 = {},
                      .next = {next, x, next},
                      .noise = solver.noise(s, levels[i + 1], tau(i))};
      step.next.insert(step.next.end(), m.begin(), m.begin() + static_cast<int64_t>(retained));
      p.steps.push_back(step);
    }
    return p;
  };
  return linear_sampler(
      {.name = kSaSolver, .history = static_cast<int64_t>(retained) + 2, .stochastic = true, .plan = plan});
}

}  // namespace

SamplerClass sa_solver_sampler() {
  return {.name = kSaSolver,
          .make = make_sa_solver,
          .words = {{"sa_solver"}},
          .fields = {"algorithm_type", "predictor_order", "corrector_order", "lower_order_final", "lambda_min_clipped",
                     "variance_type", "tau_func"},
          .models = SamplerClass::noise_or_flow,
          .shift = "flow_shift"};
}

}  // namespace md
