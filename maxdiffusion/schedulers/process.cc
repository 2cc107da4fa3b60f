// The list of noise processes. A new one is one file and one row here.
#include "maxdiffusion/schedulers/process.h"

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "maxdiffusion/schedulers/config_fields.h"

#define PROCESSES(X) X(flow_match) X(ddpm)

namespace md {

// Each returns null if the config is for another process.
#define DECLARE(name) std::shared_ptr<const NoiseProcess> make_##name(const nlohmann::json&, const ProcessKeys&);
PROCESSES(DECLARE)
#undef DECLARE

HostArray NoiseProcess::timesteps_from_sigmas(const HostArray&) const {
  fail(Code::invalid_config, "batches hold noise levels (sigmas), but this model is trained on timesteps");
}

std::shared_ptr<const NoiseProcess> NoiseProcess::restricted_to(double, double) const {
  fail(Code::invalid_config,
       "this model is not trained by flow matching; its timesteps cannot be divided between experts");
}

std::pair<int64_t, int64_t> timestep_range(const ProcessKeys& keys, int64_t T) {
  const std::pair range{keys.min_timestep, keys.max_timestep.value_or(T)};
  check(range.first >= 0 && range.first < range.second && range.second <= T, Code::invalid_config,
        "min_timestep is {} and max_timestep {}; expected 0 <= min_timestep < max_timestep <= {}", range.first,
        range.second, T);
  return range;
}

std::shared_ptr<const NoiseProcess> make_process(const nlohmann::json& config, const ProcessKeys& keys) {
  check(config.is_object(), Code::invalid_config, "scheduler config: expected a JSON object, found {}", config.dump());
#define MAKE(name) \
  if (auto process = make_##name(config, keys)) return process;
  PROCESSES(MAKE)
#undef MAKE
  fail(Code::invalid_config, "scheduler config: no noise process supports it; expected one of: {}",
       fmt::join(process_names(), ", "));
}

std::vector<std::string> process_names() {
#define NAME(name) #name,
  return {PROCESSES(NAME)};
#undef NAME
}

}  // namespace md
