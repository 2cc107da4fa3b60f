// Euler's method on straight paths from noise to data: x = (1 − σ)·x0 + σ·ε, the model predicts ε − x0, and x += (σ' −
// σ)·(ε − x0). Sigmas are evenly spaced between the shifted ends of training and then shifted, as in diffusers; with
// timestep_spacing trailing they are evenly spaced from 1 to 1/n before the shift, as pipelines of some models ask
// diffusers for. Sources: Lipman et al. 2023; Esser et al. 2024, equation 23 (shift).
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sigmas.h"
#include "maxdiffusion/schedulers/spacing.h"

namespace md {
namespace {

constexpr const char* kName = "FlowMatchEulerDiscreteScheduler";

double shifted(double shift, double sigma) { return shift * sigma / (1 + (shift - 1) * sigma); }

std::unique_ptr<Scheduler> make(const nlohmann::json& config) {
  require_off(config, {"use_lu_lambdas"});
  const auto T = field<int64_t>(config, "num_train_timesteps", 1000);
  const double shift = field(config, "shift", 1.0);
  check(T >= 1 && T <= 1'000'000, Code::invalid_config,
        "scheduler config: num_train_timesteps is {}; expected 1 or more, up to a million", T);
  check(shift > 0, Code::invalid_config, "scheduler config: shift is {}; expected a number above 0", shift);
  const std::optional<double> terminal = optional_number(config, "shift_terminal");
  check(!terminal || *terminal < 1, Code::invalid_config,
        "scheduler config: shift_terminal is {}; expected a number below 1", terminal.value_or(0));
  const bool karras = field(config, "use_karras_sigmas", false),
             exponential = field(config, "use_exponential_sigmas", false),
             inverted = field(config, "invert_sigmas", false), stochastic = field(config, "stochastic_sampling", false),
             trailing = field<std::string>(config, "timestep_spacing", "") == "trailing",
             by_size = field(config, "use_dynamic_shifting", false);  // `shift` is of the size, not of training
  check(!karras || !exponential, Code::invalid_config,
        "scheduler config: use_karras_sigmas and use_exponential_sigmas are true; set one to false");

  auto plan = [=](int64_t steps, const Knowns& k) {
    check_steps(steps, T);
    const double first = 1 / static_cast<double>(T);
    const double least = trailing ? 1 / static_cast<double>(steps) : by_size ? first : shifted(shift, first);
    std::vector<double> sigmas;
    for (int64_t i = 0; i < steps; ++i) {
      const double part = steps == 1 ? 0 : static_cast<double>(i) / static_cast<double>(steps - 1);
      sigmas.push_back(shifted(shift, 1 + (least - 1) * part));
    }
    if (terminal && *terminal != 0) stretch_shift_to_terminal(*terminal, sigmas);
    if (karras || exponential) sigmas = even_levels(karras, sigmas.front(), sigmas.back(), steps);
    LinearPlan p;
    for (double& s : sigmas) {
      if (inverted) s = 1 - s;
      p.timesteps.push_back(s * static_cast<double>(T));
    }
    sigmas.push_back(inverted ? 1 : 0);
    for (size_t i = 0; i < p.timesteps.size(); ++i) {
      const double s = sigmas[i], next = sigmas[i + 1];
      if (stochastic)
        p.steps.push_back({.next = {(1 - next) * (k.sample - s * k.output)}, .noise = next});
      else
        p.steps.push_back({.next = {k.sample + (next - s) * k.output}});
    }
    return p;
  };
  return linear_sampler({.name = kName, .stochastic = stochastic, .plan = plan});
}

}  // namespace

SamplerClass flow_match_euler_sampler() {
  return {.name = kName,
          .make = make,
          .words = {{.word = "flow_euler", .aliases = {"flow_match_euler", "flowmatch_euler"}}},
          .fields = {"shift", "invert_sigmas", "stochastic_sampling"},
          .models = SamplerClass::flow,
          .shift = "shift"};
}

}  // namespace md
