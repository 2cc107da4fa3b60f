// The list of schedulers: a new one is a file of its own and one entry here.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/schedulers/members.h"
#include "maxdiffusion/schedulers/sampler_words.h"
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
  try {
    return parse_json(text);
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
  const std::vector<std::string> known = scheduler_names();
  if (std::ranges::count(known, name) == 0)
    throw Error(Code::invalid_config, fmt::format("scheduler config: the sampler {} is not here; there are: {}", name,
                                                  fmt::join(known, ", ")))
        .note("try: scheduler=NAME, which samples with another: " +
              fmt::format("{}", fmt::join(sampler_words(), ", ")));
  require_off(config, {"thresholding", "use_beta_sigmas", "use_dynamic_shifting"});
  for (const auto& [key, value] : config.items())
    if (!key.starts_with('_') && std::ranges::find(kMembers, key) == std::end(kMembers))
      log_warning("scheduler config: '{}' is not a member that samplers here know; it has no effect", key);
#define MAKE(file, class_name) \
  if (name == (class_name)) return make_##file(config);
  SCHEDULERS(MAKE)
#undef MAKE
  fail(Code::internal, "no sampler is called {}", name);
}

std::vector<std::string> scheduler_names() {
#define NAME(file, class_name) class_name,
  return {SCHEDULERS(NAME)};
#undef NAME
}

}  // namespace md
