// The list of schedulers: a new one is a file of its own and one entry here.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/schedulers/members.h"
#include "maxdiffusion/schedulers/scheduler.h"

// clang-format off
#define SCHEDULERS(X)                                   \
  X(ddpm, "DDPMScheduler")                              \
  X(ddim, "DDIMScheduler")                              \
  X(pndm, "PNDMScheduler")                              \
  X(lms, "LMSDiscreteScheduler")                        \
  X(euler, "EulerDiscreteScheduler")                    \
  X(flow_match_euler, "FlowMatchEulerDiscreteScheduler") \
  X(dpmsolver_multistep, "DPMSolverMultistepScheduler") \
  X(unipc, "UniPCMultistepScheduler")
// clang-format on

namespace md {

#define DECLARE(file, class_name) std::unique_ptr<Scheduler> make_##file(const nlohmann::json& config);
SCHEDULERS(DECLARE)
#undef DECLARE

namespace {

/// Members that diffusers' schedulers exchange: a file written for one sampler is given to another, which then reads
/// what it knows. Those that begin with '_' are diffusers' own notes.
// clang-format off
constexpr const char* kMembers[] = {
    "algorithm_type", "base_image_seq_len", "base_shift", "beta_end", "beta_schedule", "beta_start", "clip_sample",
    "clip_sample_range", "disable_corrector", "dynamic_thresholding_ratio", "eta", "euler_at_final",
    "final_sigmas_type", "flow_shift", "interpolation_type", "invert_sigmas", "lambda_min_clipped",
    "lower_order_final", "max_image_seq_len", "max_shift", "num_train_timesteps", "predict_x0", "prediction_type",
    "rescale_betas_zero_snr", "rescale_zero_terminal_snr", "sample_max_value", "set_alpha_to_one", "shift",
    "shift_terminal", "sigma_max", "sigma_min", "skip_prk_steps", "solver_order", "solver_p", "solver_type",
    "steps_offset", "stochastic_sampling", "thresholding", "time_shift_type", "timestep_spacing", "timestep_type",
    "trained_betas", "use_beta_sigmas", "use_dynamic_shifting", "use_exponential_sigmas", "use_flow_sigmas",
    "use_karras_sigmas", "use_lu_lambdas", "variance_type"};
// clang-format on

}  // namespace

nlohmann::json parse_scheduler_config(const std::string& text) {
  std::string strict;
  bool quoted = false;
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = std::string_view(text).substr(i);
    size_t taken = 1;
    if (quoted) {
      if (rest[0] == '\\') taken = std::min<size_t>(2, rest.size());
    } else {
      for (std::string_view word : {"-Infinity", "Infinity"})
        if (rest.starts_with(word)) taken = word.size();
    }
    if (rest[0] == '"') quoted = !quoted;
    const char* quote = !quoted && taken > 1 && rest[0] != '\\' ? "\"" : "";
    strict += fmt::format("{}{}{}", quote, rest.substr(0, taken), quote);
    i += taken;
  }
  try {
    return parse_json(strict);
  } catch (const nlohmann::json::exception& e) {
    fail(Code::invalid_config, "scheduler config: {}", e.what());
  }
}

std::unique_ptr<Scheduler> make_scheduler(const nlohmann::json& config) {
  check(config.is_object(), Code::invalid_config, "scheduler config: expected a JSON object, found {}", config.dump());
  std::string name = member<std::string>(config, "_class_name", "");
  check(!name.empty(), Code::invalid_config, "scheduler config: the member _class_name is missing; expected one of: {}",
        fmt::join(scheduler_names(), ", "));
  if (name.starts_with("Flax")) name = name.substr(4);
  require_off(config, {"thresholding", "use_beta_sigmas", "use_dynamic_shifting"});
  for (const auto& [key, value] : config.items())
    if (!key.starts_with('_') && std::find(std::begin(kMembers), std::end(kMembers), key) == std::end(kMembers))
      log_warning("scheduler config: '{}' is not a member that samplers here know; it has no effect", key);
#define MAKE(file, class_name) \
  if (name == (class_name)) return make_##file(config);
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
