// DPM-Solver (for the model's noise) and DPM-Solver++ (for its x0), multistep: exponential integrators in half
// the log SNR λ, with differences of the last predictions as derivatives; and their variants for the reverse SDE.
// Sources: Lu et al. 2022a (equations 3.7, B.4), Lu et al. 2022b (algorithm 2, appendix on SDEs).

#include <algorithm>
#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kDpmsolverMultistep = "DPMSolverMultistepScheduler";

struct DpmSolver {
  bool data, sde, heun;  // data: predictions are x0, else noise

  /// The sample at levels[i + 1] from `x` at levels[i]. m: predictions, newest first, as many as the order.
  LinearStep update(const std::vector<SnrLevel>& levels, size_t i, const Form& x, const std::vector<Form>& m) const {
    const SnrLevel &s = levels[i], &t = levels[i + 1];
    const double h = t.lambda - s.lambda, shrink = std::exp(-h);
    const double u = data ? (sde ? -2 : -1) * h : h, scale = data ? t.alpha : (sde ? 2 : 1) * t.sigma;
    const double decay = data ? t.sigma / s.sigma * (sde ? shrink : 1) : t.alpha / s.alpha;
    Form next = decay * x - scale * std::expm1(u) * m[0];
    const double slope = heun || m.size() == 3 ? std::expm1(u) / u - 1 : std::expm1(u) / 2;
    if (m.size() > 1) {
      const double r0 = (s.lambda - levels[i - 1].lambda) / h;
      const Form d0 = (m[0] - m[1]) / r0;
      Form d = d0;
      if (m.size() == 3) {
        const double r1 = (levels[i - 1].lambda - levels[i - 2].lambda) / h;
        const Form curve = (d0 - (m[1] - m[2]) / r1) / (r0 + r1);
        d += r0 * curve;
        // The expansion has −1/2 in both cases; diffusers' SDE variant adds 1/2.
        next -= scale * ((std::expm1(u) - u) / (u * u) + (sde ? 0.5 : -0.5)) * curve;
      }
      next -= scale * slope * d;
    }
    const double noise = !sde ? 0 : t.sigma * std::sqrt(data ? -std::expm1(-2 * h) : std::expm1(2 * h));
    return {.x0 = {}, .next = {next}, .noise = noise};
  }
};

std::unique_ptr<Scheduler> make_dpmsolver_multistep(const nlohmann::json& config) {
  SigmaGrid grid = SigmaGrid::from_json(config);
  const std::string type = grid.noise.prediction_type;
  // Names of other solvers' settings mean the defaults, as in diffusers.
  const auto algorithm = choice(config, "algorithm_type", "dpmsolver++",
                                {"dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++", "deis"});
  const auto kind = choice(config, "solver_type", "midpoint", {"midpoint", "heun", "logrho", "bh1", "bh2"});
  const DpmSolver solver{.data = algorithm == "deis" || algorithm.ends_with("++"),
                         .sde = algorithm.starts_with("sde"),
                         .heun = kind == "heun"};
  const auto order = field<int64_t>(config, "solver_order", 2);
  check(order >= 1 && order <= 3, Code::invalid_config, "scheduler config: solver_order is {}; expected 1, 2 or 3",
        order);
  check(solver.data || !solver.sde || order < 3, Code::invalid_config,
        "scheduler config: solver_order is 3; sde-dpmsolver supports 1 and 2");
  check(solver.data || (!grid.ends_at_zero && type != "flow_prediction"), Code::invalid_config,
        "scheduler config: algorithm_type {} cannot step to no noise and needs epsilon, v_prediction or sample; set "
        "final_sigmas_type to sigma_min, or use {}++",
        algorithm, algorithm);
  check(grid.ends_at_zero || !grid.flow, Code::invalid_config,
        "scheduler config: final_sigmas_type is sigma_min with use_flow_sigmas; set it to zero");
  const auto variance = field<std::string>(config, "variance_type", "");
  check(!variance.starts_with("learned"), Code::invalid_config,
        "scheduler config: variance_type is '{}'; a model with a learned variance is not supported", variance);

  const std::optional<Threshold> threshold = threshold_of(config);
  check(solver.data || !threshold, Code::invalid_config,
        "scheduler config: thresholding is true with algorithm_type {}; expected false, or {}++", algorithm, algorithm);
  const bool low_at_end = field(config, "lower_order_final", true);
  const bool euler_at_end = field(config, "euler_at_final", false);
  grid.cut_karras = field<std::string>(config, "beta_schedule", "linear") == "squaredcos_cap_v2";
  grid.flow_from_one = false;
  grid.clip_lambda(config);

  auto plan = [=](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.multistep(steps);
    const auto levels = snr_levels(l, grid.flow);
    const size_t n = l.timesteps.size();
    const bool few = low_at_end && n < 15;
    LinearPlan p{.timesteps = l.timesteps, .steps = {}};
    for (size_t i = 0; i < n; ++i) {
      const SnrLevel& s = levels[i];
      const Form x0 = predicted_x0(type, s.alpha, s.sigma, k);
      std::vector<Form> m = {threshold     ? k.clipped
                             : solver.data ? x0
                                           : predicted_noise(type, s.alpha, s.sigma, k)};  // newest first
      m.insert(m.end(), k.history.begin(), k.history.end());
      size_t now = std::min(static_cast<size_t>(order), k.before(i) + 1);
      if (i + 2 == n && few) now = std::min<size_t>(now, 2);
      if (i + 1 == n && (few || euler_at_end || grid.ends_at_zero)) now = 1;
      if (levels[i + 1].lambda == s.lambda) now = 1;  // differences would be divided by zero
      LinearStep step = solver.update(levels, i, k.sample, {m.begin(), m.begin() + static_cast<int64_t>(now)});
      step.level = {s.alpha, s.sigma};
      if (threshold) step.x0 = x0;
      step.next.insert(step.next.end(), m.begin(), m.end() - 1);
      p.steps.push_back(step);
    }
    return p;
  };
  return linear_sampler({.name = kDpmsolverMultistep,
                         .history = order - 1,
                         .threshold = threshold,
                         .stochastic = solver.sde,
                         .plan = plan});
}

nlohmann::json dpmpp(int order, bool sde = false, const char* levels = nullptr) {
  nlohmann::json fields = {{"algorithm_type", sde ? "sde-dpmsolver++" : "dpmsolver++"}, {"solver_order", order}};
  if (levels) fields[levels] = true;
  return fields;
}

nlohmann::json dpmpp_2m_sde_heun(const char* levels = nullptr) {
  nlohmann::json fields = dpmpp(2, true, levels);
  fields["solver_type"] = "heun";
  return fields;
}

constexpr const char *kKarras = "use_karras_sigmas", *kExponential = "use_exponential_sigmas";

}  // namespace

SamplerClass dpmsolver_multistep_sampler() {
  return {.name = kDpmsolverMultistep,
          .make = make_dpmsolver_multistep,
          .words = {{"dpmpp_2m", dpmpp(2), {"dpmpp", "dpmsolverpp"}},
                    {"dpmpp_2m_karras", dpmpp(2, false, kKarras), {"dpmpp_karras"}},
                    {"dpmpp_2m_sde", dpmpp(2, true), {"dpmpp_2m_sde_gpu"}},
                    {"dpmpp_2m_sde_karras", dpmpp(2, true, kKarras)},
                    {"dpmpp_2m_sde_exponential", dpmpp(2, true, kExponential)},
                    {"dpmpp_2m_sde_heun", dpmpp_2m_sde_heun(), {"dpmpp_2m_sde_heun_gpu"}},
                    {"dpmpp_2m_sde_heun_karras", dpmpp_2m_sde_heun(kKarras)},
                    {"dpmpp_2m_sde_heun_exponential", dpmpp_2m_sde_heun(kExponential)},
                    {"dpmpp_3m", dpmpp(3)}},
          .fields = {"algorithm_type", "solver_type", "solver_order", "variance_type", "lower_order_final",
                     "euler_at_final", "lambda_min_clipped"},
          .models = SamplerClass::noise_or_flow,
          .shift = "flow_shift",
          .thresholds = true};
}

}  // namespace md
