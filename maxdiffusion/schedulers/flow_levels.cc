#include "maxdiffusion/schedulers/flow_levels.h"

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/published_levels.h"
#include "maxdiffusion/schedulers/sigmas.h"
#include "maxdiffusion/schedulers/spacing.h"

namespace md {
namespace {

double shifted(double shift, double sigma) { return shift * sigma / (1 + (shift - 1) * sigma); }

}  // namespace

FlowLevels FlowLevels::from_json(const nlohmann::json& config) {
  require_off(config, {"use_lu_lambdas"});
  FlowLevels f;
  f.T = field<int64_t>(config, "num_train_timesteps", 1000);
  f.shift = field(config, "shift", 1.0);
  check(f.T >= 1 && f.T <= 1'000'000, Code::invalid_config,
        "scheduler config: num_train_timesteps is {}; expected 1 or more, up to a million", f.T);
  check(f.shift > 0, Code::invalid_config, "scheduler config: shift is {}; expected a number above 0", f.shift);
  f.terminal = optional_number(config, "shift_terminal");
  check(!f.terminal || *f.terminal < 1, Code::invalid_config,
        "scheduler config: shift_terminal is {}; expected a number below 1", f.terminal.value_or(0));
  f.kind = sigma_kind(config);
  check(!is_published(f.kind), Code::invalid_config,
        "sigma_schedule is '{}', levels of a model that predicts noise; this is a flow-matching model", f.kind);
  f.inverted = field(config, "invert_sigmas", false);
  f.trailing = field<std::string>(config, "timestep_spacing", "") == "trailing";
  f.by_size = field(config, "use_dynamic_shifting", false);
  return f;
}

std::vector<double> FlowLevels::sigmas(int64_t steps) const {
  check_steps(steps, T);
  const auto n = static_cast<double>(steps), of_training = static_cast<double>(T), first = 1 / of_training;
  const double least = trailing ? 1 / n : by_size ? first : shifted(shift, first);
  // sgm_uniform stops one step above the lowest level.
  const double parts = kind == "sgm_uniform" ? n : n - 1;
  std::vector<double> out;
  for (int64_t i = 0; i < steps; ++i) {
    const double part = steps == 1 ? 0 : static_cast<double>(i) / parts;
    const int64_t time = T - i * T / steps;
    const double even = 1 + (least - 1) * part;
    out.push_back(shifted(shift, kind == "simple" ? static_cast<double>(time) / of_training : even));
  }
  if (terminal && *terminal != 0) stretch_shift_to_terminal(*terminal, out);
  if (kind != "training" && kind != "simple" && kind != "sgm_uniform")
    out = levels_between(kind, out.front(), out.back(), steps);
  if (inverted)
    for (double& s : out) s = 1 - s;
  out.push_back(inverted ? 1 : 0);
  return out;
}

}  // namespace md
