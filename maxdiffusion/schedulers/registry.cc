// The list of schedulers: a new one is a file of its own and one entry here.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/schedulers/members.h"
#include "maxdiffusion/schedulers/scheduler.h"

// clang-format off
#define SCHEDULERS(X)                \
  X(ddpm, "DDPMScheduler")           \
  X(ddim, "DDIMScheduler")           \
  X(euler, "EulerDiscreteScheduler")
// clang-format on

namespace md {

#define DECLARE(file, class_name) std::unique_ptr<Scheduler> make_##file(const nlohmann::json& config);
SCHEDULERS(DECLARE)
#undef DECLARE

std::unique_ptr<Scheduler> make_scheduler(const nlohmann::json& config) {
  check(config.is_object(), Code::invalid_config, "scheduler config: expected a JSON object, found {}", config.dump());
  std::string name = member<std::string>(config, "_class_name", "");
  check(!name.empty(), Code::invalid_config, "scheduler config: the member _class_name is missing; known are {}",
        fmt::join(scheduler_names(), ", "));
  if (name.starts_with("Flax")) name = name.substr(4);
#define MAKE(file, class_name) \
  if (name == class_name) return make_##file(config);
  SCHEDULERS(MAKE)
#undef MAKE
  fail(Code::invalid_config, "scheduler config: _class_name '{}' is not one of: {}", name,
       fmt::join(scheduler_names(), ", "));
}

std::vector<std::string> scheduler_names() {
#define NAME(file, class_name) class_name,
  return {SCHEDULERS(NAME)};
#undef NAME
}

}  // namespace md
