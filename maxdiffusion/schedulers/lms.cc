// Linear multistep (Adams–Bashforth) on the probability-flow ODE in σ: the polynomial through the last four derivatives
// is integrated from σ to the next one.
// Source: Karras et al. 2022 for the ODE; the order is diffusers' default.

#include <algorithm>
#include <cmath>
#include <span>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"

namespace md {
namespace {

constexpr const char* kLms = "LMSDiscreteScheduler";

constexpr size_t kOrder = 4;

/// ∫ from `a` to `b` of the polynomial that is 1 at node `which` and 0 at the others. There are at most 4 nodes, so
/// Gauss's two-point rule, exact up to degree 3, suffices.
double basis_integral(std::span<const double> nodes, size_t which, double a, double b) {
  double sum = 0;
  for (double point : {-1 / std::sqrt(3.0), 1 / std::sqrt(3.0)}) {
    const double x = (a + b + point * (b - a)) / 2;
    double product = 1;
    for (size_t k = 0; k < nodes.size(); ++k)
      if (k != which) product *= (x - nodes[k]) / (nodes[which] - nodes[k]);
    sum += product;
  }
  return sum * (b - a) / 2;
}

std::unique_ptr<Scheduler> make_lms(const nlohmann::json& config) {
  require_off(config, {"use_lu_lambdas", "use_flow_sigmas"});
  choice(config, "interpolation_type", "linear", {"linear"});
  choice(config, "final_sigmas_type", "zero", {"zero"});

  auto plan = [grid = SigmaGrid::from_json(config)](int64_t steps, const Knowns& k) {
    const SigmaLevels l = grid.spaced(steps);
    LinearPlan p{.timesteps = l.timesteps, .steps = {}, .init_noise_sigma = sigma_init_noise(grid, l)};
    for (size_t i = 0; i < l.timesteps.size(); ++i) {
      std::vector<Form> slopes = {sigma_derivative(grid.noise.prediction_type, l.sigmas[i], k)};  // newest first
      slopes.insert(slopes.end(), k.history.begin(), k.history.end());
      std::vector<double> nodes;
      for (size_t j = 0; j < std::min(i + 1, kOrder); ++j) nodes.push_back(l.sigmas[i - j]);
      LinearStep step{.level = {1, l.sigmas[i]}, .input_scale = sigma_input_scale(l.sigmas[i]), .next = {k.sample}};
      for (size_t j = 0; j < nodes.size(); ++j)
        step.next[0] += basis_integral(nodes, j, l.sigmas[i], l.sigmas[i + 1]) * slopes[j];
      step.next.insert(step.next.end(), slopes.begin(), slopes.end() - 1);
      p.steps.push_back(step);
    }
    return p;
  };
  return linear_sampler({.name = kLms, .history = kOrder - 1, .plan = plan});
}

}  // namespace

SamplerClass lms_sampler() {
  return {.name = kLms,
          .make = make_lms,
          .words = {{"lms"}, {"lms_karras", {{"use_karras_sigmas", true}}}},
          .fields = {"interpolation_type"}};
}

}  // namespace md
