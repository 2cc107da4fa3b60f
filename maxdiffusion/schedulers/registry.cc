// The list of samplers. A new one is one file (sampler_class.h) and one row here.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/sampler_names.h"
#include "maxdiffusion/schedulers/scheduler.h"

// In the order of lists in messages.
#define SAMPLERS(X)      \
  X(ddpm)                \
  X(ddim)                \
  X(pndm)                \
  X(lms)                 \
  X(euler)               \
  X(euler_ancestral)     \
  X(heun)                \
  X(dpm2)                \
  X(dpm2_ancestral)      \
  X(dpmpp_2s_ancestral)  \
  X(dpmpp_sde)           \
  X(dpmpp_3m_sde)        \
  X(restart)             \
  X(flow_match_euler)    \
  X(flow_match_heun)     \
  X(flow_match_lcm)      \
  X(dpmsolver_multistep) \
  X(unipc)               \
  X(deis)                \
  X(sa_solver)           \
  X(lcm)                 \
  X(tcd)

namespace md {

#define DECLARE(file) SamplerClass file##_sampler();
SAMPLERS(DECLARE)
#undef DECLARE

const std::vector<SamplerClass>& sampler_classes() {
#define ROW(file) file##_sampler(),
  static const std::vector<SamplerClass> all = {SAMPLERS(ROW)};
#undef ROW
  return all;
}

const SamplerClass* find_sampler(const std::string& class_name) {
  const std::string name = class_name.starts_with("Flax") ? class_name.substr(4) : class_name;
  const auto found = std::ranges::find(sampler_classes(), name, &SamplerClass::name);
  return found == sampler_classes().end() ? nullptr : &*found;
}

namespace {

/// Fields that shared parts read: NoiseSchedule, spacings, clip_range, SigmaGrid, and make_scheduler.
// clang-format off
constexpr const char* kShared[] = {
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr",
    "rescale_zero_terminal_snr", "prediction_type", "timestep_spacing", "steps_offset", "clip_sample",
    "clip_sample_range", "use_karras_sigmas", "use_exponential_sigmas", "use_lu_lambdas", "use_flow_sigmas",
    "sigma_min", "sigma_max", "final_sigmas_type", "flow_shift", "shift_terminal", "thresholding",
    "dynamic_thresholding_ratio", "sample_max_value", "use_beta_sigmas", "sigma_schedule", "use_dynamic_shifting", "base_shift",
    "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type"};
// clang-format on

/// Whether the field is known. diffusers' samplers share config files, so fields of other samplers are accepted, as are
/// fields that begin with '_', which are diffusers' metadata.
bool is_known(const std::string& field) {
  return field.starts_with('_') || std::ranges::find(kShared, field) != std::end(kShared) ||
         std::ranges::any_of(sampler_classes(), [&](const SamplerClass& s) {
           return std::ranges::find(s.fields, field) != s.fields.end();
         });
}

/// The shift e^μ (time_shift_type linear: μ). μ is log_shift, or linear in the number of tokens.
/// Source: Esser et al. 2024, section 5.3.2; `calculate_shift` of diffusers' pipelines.
double shift_by_size(const nlohmann::json& config, const SampleFacts& facts) {
  auto shift = [&](double mu) {
    return choice(config, "time_shift_type", "exponential", {"exponential", "linear"}) == "linear" ? mu : std::exp(mu);
  };
  if (facts.log_shift) return shift(*facts.log_shift);
  const int64_t tokens = facts.tokens;
  check(tokens > 0, Code::invalid_config,
        "scheduler config: use_dynamic_shifting is true, but the number of tokens of a sample is not given; set it to "
        "false");
  const double least = field(config, "base_image_seq_len", 256.0), most = field(config, "max_image_seq_len", 4096.0),
               low = field(config, "base_shift", 0.5), high = field(config, "max_shift", 1.15);
  check(least < most, Code::invalid_config, "scheduler config: base_image_seq_len is {}, max_image_seq_len {}", least,
        most);
  return shift(low + (high - low) * (static_cast<double>(tokens) - least) / (most - least));
}

}  // namespace

nlohmann::json parse_scheduler_config(const std::string& text) {
  try {
    return parse_json(text);
  } catch (const nlohmann::json::exception& e) {
    fail(Code::invalid_config, "scheduler config: {}", e.what());
  }
}

namespace {

/// All classes, first the nearest to `name`. All names have the same ending, so a near name with another beginning is
/// another sampler: LMSDiscreteScheduler is not HeunDiscreteScheduler.
std::string nearest_classes_first(const std::string& name) {
  constexpr size_t kBeginning = 2;
  const std::string near = nearest(name, scheduler_names());
  return nearest_first(near.substr(0, kBeginning) == name.substr(0, kBeginning) ? near : "", scheduler_names());
}

}  // namespace

std::unique_ptr<Scheduler> make_scheduler(const nlohmann::json& scheduler_config, const SampleFacts& facts) {
  check(scheduler_config.is_object(), Code::invalid_config, "scheduler config: expected a JSON object, found {}",
        scheduler_config.dump());
  const std::string name = field<std::string>(scheduler_config, "_class_name", "");
  check(!name.empty(), Code::invalid_config, "scheduler config: the field _class_name is missing; expected one of: {}",
        fmt::join(scheduler_names(), ", "));
  const SamplerClass* sampler = find_sampler(name);
  if (const std::string plain = name.starts_with("Flax") ? name.substr(4) : name; !sampler)
    throw Error(Code::invalid_config,
                fmt::format("scheduler config: the sampler {} is not supported; expected one of: {}", plain,
                            nearest_classes_first(plain)))
        .note("try: scheduler=NAME, which samples with another: " +
              fmt::format("{}", fmt::join(sampler_names(), ", ")));
  if (!sampler->thresholds) require_off(scheduler_config, {"thresholding"});
  const bool flow = is_flow_matching(scheduler_config) && sampler->shift;
  if (!flow) require_off(scheduler_config, {"use_dynamic_shifting"});
  for (const auto& [key, value] : scheduler_config.items())
    if (!is_known(key)) log_warning("scheduler config: '{}' is an unknown field; it is ignored", key);

  if (continuous_timesteps(scheduler_config) &&
      std::ranges::none_of(sampler->fields, [](std::string_view f) { return f == "timestep_type"; }))
    log_warning(
        "scheduler config: timestep_type is continuous, which {} ignores, as in diffusers: the model gets timesteps of "
        "0 to {} in place of log σ; use scheduler=euler",
        sampler->name, field<int64_t>(scheduler_config, "num_train_timesteps", 1000) - 1);

  nlohmann::json config = scheduler_config;
  if (sampler->models == SamplerClass::flow && facts.even_flow_steps) config["timestep_spacing"] = "trailing";
  if (field(config, "use_dynamic_shifting", false)) config[sampler->shift] = shift_by_size(config, facts);
  return sampler->make(config);
}

std::vector<std::string> scheduler_names() {
  std::vector<std::string> names;
  for (const SamplerClass& s : sampler_classes()) names.emplace_back(s.name);
  return names;
}

}  // namespace md
