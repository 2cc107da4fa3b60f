#include "maxdiffusion/schedulers/sigmas.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/spacing.h"

namespace md {

std::vector<double> even_levels(bool karras, double top, double bottom, int64_t n) {
  auto bend = [&](double s) { return karras ? std::pow(s, 1 / 7.0) : std::log(s); };
  std::vector<double> sigmas = {top};
  for (int64_t i = 1; i < n - 1; ++i) {
    const double s = bend(top) + static_cast<double>(i) / static_cast<double>(n - 1) * (bend(bottom) - bend(top));
    sigmas.push_back(karras ? std::pow(s, 7) : std::exp(s));
  }
  if (n > 1) sigmas.push_back(bottom);
  return sigmas;
}

void stretch_shift_to_terminal(double terminal, std::vector<double>& sigmas) {
  if (sigmas.size() < 2) return;  // diffusers divides by zero
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
  g.kind = "training";
  for (const auto& [name, kind] : std::initializer_list<std::pair<const char*, std::string>>{
           {"use_karras_sigmas", "karras"}, {"use_exponential_sigmas", "exponential"}, {"use_lu_lambdas", "lu"}}) {
    if (!field(config, name, false)) continue;
    check(g.kind == "training", Code::invalid_config, "scheduler config: {} is true with {} levels; set one to false",
          name, g.kind);
    check(!g.flow || kind == "karras", Code::invalid_config,
          "scheduler config: {} and use_flow_sigmas are true; set one to false", name);
    g.kind = kind;
  }
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
  if (g.kind == "training" && (g.sigma_min || g.sigma_max))
    log_warning("scheduler config: sigma_min and sigma_max have no effect without use_karras_sigmas or the like");
  if (!g.flow && g.flow_shift != 1) log_warning("scheduler config: flow_shift has no effect without use_flow_sigmas");
  g.end = g.noise.num_train_timesteps;
  return g;
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

/// Linear in log σ between the timesteps of training.
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

std::vector<double> SigmaGrid::respaced(double top, double bottom, int64_t n) const {
  return even_levels(kind == "karras", sigma_max.value_or(top), sigma_min.value_or(bottom), n);
}

SigmaLevels SigmaGrid::spaced(int64_t steps) const {
  SigmaLevels l{.timesteps = spaced_timesteps(spacing, steps, noise.num_train_timesteps, offset), .sigmas = {}};
  if (log_linear) {
    const double last = static_cast<double>(noise.num_train_timesteps - 1);
    l.sigmas = even_levels(false, training_sigma(last), training_sigma(0), steps + 1);
  } else {
    for (double t : l.timesteps) l.sigmas.push_back(training_sigma(t));
  }
  if (kind != "training") {
    l.sigmas = respaced(l.sigmas.front(), l.sigmas.back(), steps);
    for (size_t i = 0; i < l.sigmas.size(); ++i) l.timesteps[i] = timestep_of(l.sigmas[i]);
  }
  l.sigmas.push_back(ends_at_zero ? 0 : training_sigma(0));
  return l;
}

std::vector<double> SigmaGrid::flow_levels(int64_t steps) const {
  // In diffusers' order of operations: timesteps are truncated from these.
  const auto n = static_cast<double>(steps), T = static_cast<double>(noise.num_train_timesteps);
  const double stride = (1 / T - 1) / n;
  std::vector<double> sigmas;
  for (int64_t i = 0; i < steps; ++i) {
    const auto x = static_cast<double>(i);
    const double u = flow_from_one ? x * stride + 1 : 1 - (i == 0 ? 1 / T : (n - x) * stride + 1);
    sigmas.push_back(flow_shift * u / (1 + (flow_shift - 1) * u));
  }
  if (shift_terminal) stretch_shift_to_terminal(*shift_terminal, sigmas);
  sigmas[0] = std::min(sigmas[0], 1 - 1e-6);  // the SNR of 1 is 0
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
      const bool cut = flow || kind == "exponential" || cut_karras;
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
