// UniPC: the unified predictor-corrector of any order. Each model call first corrects the step that led to it, then
// predicts the next one; both are exponential integrators in half the log SNR λ over the last predictions.
// Source: Zhao et al. 2023, equations 3, 9 and algorithms 5–8 (B(h) variants).

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kUnipc = "UniPCMultistepScheduler";

/// ρ with Σ_j r_j^i ρ_j = b_i for i = 0 … n−1; r distinct, n ≥ 1.
std::vector<double> solve_powers(const std::vector<double>& r, std::vector<double> b) {
  // A Vandermonde system by Newton's form (Björck and Pereyra 1970).
  const size_t n = r.size();
  for (size_t k = 0; k + 1 < n; ++k)
    for (size_t i = n - 1; i > k; --i) b[i] -= r[k] * b[i - 1];
  for (size_t k = n - 1; k-- > 0;) {
    for (size_t i = k + 1; i < n; ++i) b[i] /= r[i] - r[i - k - 1];
    for (size_t i = k; i + 1 < n; ++i) b[i] -= b[i + 1];
  }
  return b;
}

struct UniPcSolver {
  bool data, bh1;  // data: predictions are x0, else noise

  /// The sample at the next level from `x` at level `from`. m: predictions at `from` and earlier, newest first, as many
  /// as the order. `arrived`: the prediction at the next level (corrector), or null (predictor).
  Form update(const std::vector<SnrLevel>& levels, size_t from, const Form& x, const std::vector<Form>& m,
              const Form* arrived) const {
    const SnrLevel &s = levels[from], &t = levels[from + 1];
    const double h = t.lambda - s.lambda, hh = data ? -h : h, scale = data ? t.alpha : t.sigma;
    // α·(e^−h − 1) and σ·(e^h − 1), valid also if h is infinite.
    const double first = data ? t.sigma * s.alpha / s.sigma - t.alpha : t.alpha * s.sigma / s.alpha - t.sigma;
    Form next = (data ? t.sigma / s.sigma : t.alpha / s.alpha) * x - first * m[0];
    if (h == 0 || std::isinf(h) || (m.size() == 1 && !arrived)) return next;

    std::vector<double> r;
    std::vector<Form> d;
    for (size_t j = 1; j < m.size(); ++j) {
      r.push_back((levels[from - j].lambda - s.lambda) / h);
      d.push_back((m[j] - m[0]) / r.back());
    }
    if (arrived) r.push_back(1), d.push_back(*arrived - m[0]);
    const double B = bh1 ? hh : std::expm1(hh);
    std::vector<double> b;
    double phi = std::expm1(hh) / hh - 1, factorial = 1;
    for (size_t i = 0; i < r.size(); ++i) {
      b.push_back(phi * factorial / B);
      factorial *= static_cast<double>(i + 2);
      phi = phi / hh - 1 / factorial;
    }
    const auto rho = r.size() == 1 ? std::vector<double>{0.5} : solve_powers(r, b);
    for (size_t j = 0; j < d.size(); ++j) next -= scale * B * rho[j] * d[j];
    return next;
  }
};

std::unique_ptr<Scheduler> make_unipc(const nlohmann::json& config) {
  require_off(config, {"use_lu_lambdas"});
  const SigmaGrid grid = SigmaGrid::from_json(config);
  const std::string type = grid.noise.prediction_type;
  // Names of DPM-Solver's types mean bh2, as in diffusers.
  const auto kind = choice(config, "solver_type", "bh2", {"bh1", "bh2", "midpoint", "heun", "logrho"});
  const UniPcSolver solver{.data = field(config, "predict_x0", true), .bh1 = kind == "bh1"};
  const auto order = field<int64_t>(config, "solver_order", 2);
  check(order >= 1 && order <= 3, Code::invalid_config, "scheduler config: solver_order is {}; expected 1, 2 or 3",
        order);
  check(solver.data || type != "flow_prediction", Code::invalid_config,
        "scheduler config: prediction_type is flow_prediction, which needs predict_x0");
  const bool low_at_end = field(config, "lower_order_final", true);
  const nlohmann::json corrector = config.value("disable_corrector", nlohmann::json());
  check(!corrector.is_boolean(), Code::invalid_config,
        "scheduler config: disable_corrector is {}; expected the list of the steps that are not corrected, such as [0, "
        "1], or [] for none",
        corrector.dump());
  const auto uncorrected = field(config, "disable_corrector", std::vector<int64_t>{});
  check(!config.contains("solver_p") || config["solver_p"].is_null(), Code::invalid_config,
        "scheduler config: solver_p is given; another solver as predictor is not supported");

  auto plan = [=](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.multistep(steps);
    const auto levels = snr_levels(l, grid.flow);
    const size_t n = l.timesteps.size();
    LinearPlan p{.timesteps = l.timesteps, .steps = {}};
    size_t now = 0;
    // Carried: the input sample of the last prediction, then predictions, newest first.
    const std::vector<Form> before(k.history.begin() + 1, k.history.end());
    auto newest = [](const std::vector<Form>& m, size_t count) {
      return std::vector<Form>(m.begin(), m.begin() + static_cast<int64_t>(count));
    };
    for (size_t i = 0; i < n; ++i) {
      const SnrLevel& s = levels[i];
      std::vector<Form> m = {solver.data ? predicted_x0(type, s.alpha, s.sigma, k)
                                         : predicted_noise(type, s.alpha, s.sigma, k)};
      m.insert(m.end(), before.begin(), before.end());
      Form x = k.sample;
      const auto last = static_cast<int64_t>(i) - 1;
      if (k.before(i) > 0 && std::find(uncorrected.begin(), uncorrected.end(), last) == uncorrected.end())
        x = solver.update(levels, i - 1, k.history[0], newest(before, now), &m[0]);
      now = std::min(static_cast<size_t>(order), k.before(i) + 1);
      if (low_at_end) now = std::min(now, n - i);
      LinearStep step{
          .level = {s.alpha, s.sigma}, .x0 = {}, .next = {solver.update(levels, i, x, newest(m, now), nullptr), x}};
      step.next.insert(step.next.end(), m.begin(), m.end() - 1);
      p.steps.push_back(step);
    }
    return p;
  };
  return linear_sampler({.name = kUnipc, .history = order + 1, .plan = plan});
}

}  // namespace

SamplerClass unipc_sampler() {
  return {.name = kUnipc,
          .make = make_unipc,
          .words = {{.word = "unipc", .aliases = {"uni_pc"}}, {"unipc_karras", {{"use_karras_sigmas", true}}}},
          .fields = {"predict_x0", "solver_type", "solver_order", "lower_order_final", "disable_corrector", "solver_p"},
          .models = SamplerClass::noise_or_flow,
          .shift = "flow_shift"};
}

}  // namespace md
