// Fields of scheduler_config.json with defaults: null and absent give the default; a wrong type is an error naming the
// field, its value and the expected type.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/schedulers/linear.h"

namespace md {

/// T: bool, int64_t, double (also "Infinity" and "-Infinity", but not NaN), std::string, or a vector of numbers.
template <class T>
T field(const nlohmann::json& config, const char* name, T fallback);
template <>
bool field(const nlohmann::json& config, const char* name, bool fallback);
template <>
int64_t field(const nlohmann::json& config, const char* name, int64_t fallback);
template <>
double field(const nlohmann::json& config, const char* name, double fallback);
template <>
std::string field(const nlohmann::json& config, const char* name, std::string fallback);
template <>
std::vector<double> field(const nlohmann::json& config, const char* name, std::vector<double> fallback);
template <>
std::vector<int64_t> field(const nlohmann::json& config, const char* name, std::vector<int64_t> fallback);

std::optional<double> optional_number(const nlohmann::json& config, const char* name);
/// A string field with one of the known values.
std::string choice(const nlohmann::json& config, const char* name, const std::string& fallback,
                   std::initializer_list<const char*> known);
/// Throws if an unsupported switch that would change the result is on.
void require_off(const nlohmann::json& config, std::initializer_list<const char*> names);
/// x0 is clipped to ± this; 0: not clipped.
double clip_range(const nlohmann::json& config);
/// thresholding, dynamic_thresholding_ratio, sample_max_value; absent: off.
std::optional<Threshold> threshold_of(const nlohmann::json& config);

/// Switches of samplers with sigmas; the others require them off.
inline constexpr std::initializer_list<const char*> kSigmaSwitches = {
    "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas", "use_flow_sigmas"};
/// For samplers whose steps are timesteps: throws if one of these is on, or sigma_schedule is given.
void require_no_sigma_schedule(const nlohmann::json& config);

/// Whether the model's timestep is ¼·log σ, as EDM's models and Stable Video Diffusion are trained: timestep_type is
/// continuous. With other predictions than v the field is ignored, as in diffusers.
bool continuous_timesteps(const nlohmann::json& config);

}  // namespace md
