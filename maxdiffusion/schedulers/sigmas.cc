#include "maxdiffusion/schedulers/sigmas.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/published_levels.h"
#include "maxdiffusion/schedulers/spacing.h"

namespace md {

namespace {

/// x with I_x(a, a) = p, the regularized incomplete beta function, for a < 1.
double symmetric_beta_quantile(double p, double a) {
  if (p <= 0 || p >= 1) return p <= 0 ? 0 : 1;
  if (p > 0.5) return 1 - symmetric_beta_quantile(1 - p, a);
  // I_x = x^a / (a·B(a, a)) · Σ_k (1 − a)_k / k! · a / (a + k) · x^k, which converges fast for x ≤ ½.
  const double scale = std::exp(2 * std::lgamma(a) - std::lgamma(2 * a)) * a;
  auto cumulated = [&](double x) {
    double term = 1, sum = 1;
    for (int k = 1; term > 1e-17 * sum; ++k) {
      term *= (k - a) / k * x;
      sum += term * a / (a + k);
    }
    return std::pow(x, a) / scale * sum;
  };
  double low = 0, high = 0.5;
  for (int i = 0; i < 200 && low < high; ++i) {
    const double middle = low + (high - low) / 2;
    if (middle == low || middle == high) break;
    (cumulated(middle) < p ? low : high) = middle;
  }
  return high;
}

}  // namespace

const std::vector<std::string>& sigma_schedules() {
  static const std::vector<std::string> all = {"karras",      "exponential", "beta",     "kl_optimal", "simple",
                                               "sgm_uniform", "ays_sd15",    "ays_sdxl", "ays_svd",    "gits"};
  return all;
}

std::string sigma_kind(const nlohmann::json& config) {
  std::string kind = "training", by;
  const auto schedule = field<std::string>(config, "sigma_schedule", "");
  if (!schedule.empty() && schedule != "training") {
    check(std::ranges::count(sigma_schedules(), schedule) > 0, Code::invalid_config,
          "sigma_schedule is '{}'; expected one of: training, {}", schedule, fmt::join(sigma_schedules(), ", "));
    kind = schedule, by = "sigma_schedule";
  }
  for (const auto& [name, its] :
       std::initializer_list<std::pair<const char*, std::string>>{{"use_karras_sigmas", "karras"},
                                                                  {"use_exponential_sigmas", "exponential"},
                                                                  {"use_beta_sigmas", "beta"},
                                                                  {"use_lu_lambdas", "lu"}}) {
    if (!field(config, name, false)) continue;
    check(by.empty(), Code::invalid_config, "scheduler config: {} is true with {} levels; set one to false", name,
          kind);
    kind = its, by = name;
  }
  return kind;
}

std::vector<double> levels_between(const std::string& kind, double top, double bottom, int64_t n) {
  const bool karras = kind == "karras", kl = kind == "kl_optimal";
  auto bend = [&](double s) { return karras ? std::pow(s, 1 / 7.0) : kl ? std::atan(s) : std::log(s); };
  std::vector<double> sigmas = {top};
  for (int64_t i = 1; i < n - 1; ++i) {
    const double part = static_cast<double>(i) / static_cast<double>(n - 1);
    const double s = bend(top) + part * (bend(bottom) - bend(top));
    sigmas.push_back(kind == "beta" ? bottom + symmetric_beta_quantile(1 - part, 0.6) * (top - bottom)
                     : karras       ? std::pow(s, 7)
                     : kl           ? std::tan(s)
                                    : std::exp(s));
  }
  if (n > 1) sigmas.push_back(bottom);
  return sigmas;
}

void stretch_shift_to_terminal(double terminal, std::vector<double>& sigmas) {
  if (sigmas.size() < 2) return;  // diffusers would divide by zero
  const double scale = (1 - sigmas.back()) / (1 - terminal);
  for (double& s : sigmas) s = 1 - (1 - s) / scale;
}

SigmaGrid SigmaGrid::from_json(const nlohmann::json& config) {
  SigmaGrid g;
  g.flow = field(config, "use_flow_sigmas", false);
  g.noise = NoiseSchedule::from_json(config, g.flow);
  g.spacing = choice(config, "timestep_spacing", "linspace", {"linspace", "leading", "trailing"});
  g.offset = field<int64_t>(config, "steps_offset", 0);
  g.sigma_min = optional_number(config, "sigma_min");
  g.sigma_max = optional_number(config, "sigma_max");
  g.ends_at_zero = choice(config, "final_sigmas_type", "zero", {"zero", "sigma_min"}) == "zero";
  g.flow_shift = field(config, "flow_shift", 1.0);
  g.shift_terminal = optional_number(config, "shift_terminal");
  g.kind = sigma_kind(config);
  check(!g.flow || g.kind == "training" || g.kind == "karras", Code::invalid_config,
        "scheduler config: levels are {} and use_flow_sigmas is true; expected training or karras, or the sampler "
        "flow_euler",
        g.kind);
  for (const auto& [name, sigma] : {std::pair{"sigma_min", g.sigma_min}, {"sigma_max", g.sigma_max}})
    check(!sigma || (*sigma > 0 && std::isfinite(*sigma)), Code::invalid_config,
          "scheduler config: {} is {}; expected a number above 0", name, sigma.value_or(0));
  check(g.sigma_min.value_or(0) < g.sigma_max.value_or(HUGE_VAL), Code::invalid_config,
        "scheduler config: sigma_min is {}, sigma_max {}; expected less to more", g.sigma_min.value_or(0),
        g.sigma_max.value_or(0));
  check(g.flow_shift > 0, Code::invalid_config, "scheduler config: flow_shift is {}; expected a number above 0",
        g.flow_shift);
  check(!g.shift_terminal || (g.flow && *g.shift_terminal < 1), Code::invalid_config,
        "scheduler config: shift_terminal needs use_flow_sigmas and a number below 1");
  const bool table = g.kind == "training" || g.kind == "simple" || g.kind == "sgm_uniform" || is_published(g.kind);
  if (table && (g.sigma_min || g.sigma_max))
    log_warning("scheduler config: sigma_min and sigma_max are ignored without use_karras_sigmas or the like");
  if (!g.flow && g.flow_shift != 1) log_warning("scheduler config: flow_shift is ignored without use_flow_sigmas");
  g.end = g.noise.num_train_timesteps;
  return g;
}

SigmaGrid grid_to_zero(const nlohmann::json& config) {
  require_off(config, {"use_lu_lambdas", "use_flow_sigmas"});
  choice(config, "final_sigmas_type", "zero", {"zero"});
  return SigmaGrid::from_json(config);
}

void SigmaGrid::clip_lambda(const nlohmann::json& config) {
  const double lowest = field(config, "lambda_min_clipped", -HUGE_VAL);
  while (end > 0 && -std::log(training_sigma(static_cast<double>(end - 1))) < lowest) --end;
  check(end > 0, Code::invalid_config, "scheduler config: lambda_min_clipped is {}, above all of training", lowest);
}

double SigmaGrid::training_sigma(double t) const {
  auto whole = [&](size_t i) {
    const double a = divisible(noise.alphas_cumprod[i]);
    return std::sqrt((1 - a) / a);
  };
  const auto below = static_cast<size_t>(std::floor(t));
  const double part = t - std::floor(t);
  return part == 0 ? whole(below) : whole(below) * (1 - part) + whole(below + 1) * part;
}

double SigmaGrid::timestep_of(double sigma) const {
  const int64_t T = noise.num_train_timesteps;
  if (T == 1) return 0;
  auto at = [&](int64_t t) { return std::log(training_sigma(static_cast<double>(t))); };
  const double x = std::log(sigma);
  int64_t low = 0;
  while (low + 2 < T && at(low + 1) <= x) ++low;
  const double part = (x - at(low)) / (at(low + 1) - at(low));
  return static_cast<double>(low) + std::clamp(part, 0.0, 1.0);
}

double SigmaGrid::log_linear_sigma(double t) const {
  const double below = std::floor(t), part = t - below;
  if (part == 0) return training_sigma(below);
  return std::exp(std::log(training_sigma(below)) * (1 - part) + std::log(training_sigma(below + 1)) * part);
}

std::vector<double> SigmaGrid::respaced(double top, double bottom, int64_t n) const {
  if (is_published(kind)) return published_levels(kind, n);
  if (kind != "simple" && kind != "sgm_uniform")
    return levels_between(kind, sigma_max.value_or(top), sigma_min.value_or(bottom), n);
  std::vector<double> sigmas;
  const int64_t T = noise.num_train_timesteps;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t time = T - 1 - i * T / n;
    sigmas.push_back(kind == "simple"
                         ? training_sigma(static_cast<double>(time))
                         : log_linear_sigma(static_cast<double>((T - 1) * (n - i)) / static_cast<double>(n)));
  }
  return sigmas;
}

SigmaLevels SigmaGrid::spaced(int64_t steps) const {
  SigmaLevels l{.timesteps = spaced_timesteps(spacing, steps, noise.num_train_timesteps, offset), .sigmas = {}};
  if (log_linear) {
    const double last = static_cast<double>(noise.num_train_timesteps - 1);
    l.sigmas = levels_between("exponential", training_sigma(last), training_sigma(0), steps + 1);
  } else {
    for (double t : l.timesteps) l.sigmas.push_back(training_sigma(t));
  }
  if (kind != "training") {
    l.sigmas = respaced(l.sigmas.front(), l.sigmas.back(), steps);
    for (size_t i = 0; i < l.sigmas.size(); ++i) {
      const double t = timestep_of(l.sigmas[i]);
      l.timesteps[i] = whole_karras && kind == "karras" ? std::nearbyint(t) : t;
    }
  }
  l.sigmas.push_back(ends_at_zero ? 0 : training_sigma(0));
  return l;
}

std::vector<double> SigmaGrid::flow_levels(int64_t steps) const {
  // Operations in diffusers' order, because timesteps are truncated from the result.
  const auto n = static_cast<double>(steps), T = static_cast<double>(noise.num_train_timesteps);
  const double stride = (1 / T - 1) / n;
  std::vector<double> sigmas;
  for (int64_t i = 0; i < steps; ++i) {
    const auto x = static_cast<double>(i);
    const double u = flow_from_one ? x * stride + 1 : 1 - (i == 0 ? 1 / T : (n - x) * stride + 1);
    sigmas.push_back(flow_shift * u / (1 + (flow_shift - 1) * u));
  }
  if (shift_terminal) stretch_shift_to_terminal(*shift_terminal, sigmas);
  sigmas[0] = std::min(sigmas[0], 1 - 1e-6);  // the SNR at σ = 1 is 0
  return sigmas;
}

SigmaLevels SigmaGrid::multistep(int64_t steps) const {
  const int64_t T = noise.num_train_timesteps;
  check_steps(steps, T);
  SigmaLevels l;
  if (kind != "training") {
    l.sigmas = respaced(training_sigma(static_cast<double>(T - 1)), training_sigma(0), steps);
    for (double& s : l.sigmas) {
      if (flow) s /= s + 1;
      const double t = flow ? s * static_cast<double>(T) : timestep_of(s);
      const bool cut = flow || kind == "exponential" || kind == "beta" || cut_karras;
      l.timesteps.push_back(cut ? std::floor(t) : std::nearbyint(t));
    }
  } else if (flow) {
    l.sigmas = flow_levels(steps);
    for (double s : l.sigmas) l.timesteps.push_back(std::floor(s * static_cast<double>(T)));
  } else {
    l.timesteps = multistep_timesteps(spacing, steps, T, offset, end);
    for (double t : l.timesteps) l.sigmas.push_back(training_sigma(t));
  }
  l.sigmas.push_back(ends_at_zero ? 0 : flow || kind != "training" ? l.sigmas.back() : training_sigma(0));
  return l;
}

Form sigma_derivative(const std::string& prediction_type, double sigma, const Knowns& k) {
  // x0 + σ·ε is √(σ² + 1) times α·x0 + σ'·ε.
  const double scale = sigma_input_scale(sigma);
  if (prediction_type == "v_prediction") return sigma * scale * scale * k.sample + scale * k.output;
  if (prediction_type == "sample") return (k.sample - k.output) / sigma;
  return k.output;
}

double sigma_input_scale(double sigma) { return 1 / std::sqrt(sigma * sigma + 1); }

double sigma_init_noise(const SigmaGrid& grid, const SigmaLevels& levels) {
  const double top = *std::max_element(levels.sigmas.begin(), levels.sigmas.end());
  return grid.spacing == "leading" ? std::sqrt(top * top + 1) : top;
}

std::vector<SnrLevel> snr_levels(const SigmaLevels& levels, bool flow) {
  std::vector<SnrLevel> out;
  for (double s : levels.sigmas) {
    const double alpha = flow ? 1 - s : 1 / std::sqrt(s * s + 1), sigma = flow ? s : s * alpha;
    out.push_back({alpha, sigma, std::log(alpha) - std::log(sigma)});
  }
  return out;
}

}  // namespace md
