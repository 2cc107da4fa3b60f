// Short names of samplers (euler, dpmpp_2m_karras), and the scheduler_config.json of each.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <set>
#include <string>
#include <vector>

namespace md {

/// All names; each is a scheduler class with some of its fields.
std::vector<std::string> sampler_names();
/// The name of `given` in any spelling ("DPM++ 2M Karras", "Euler"), or its class ("EulerDiscreteScheduler"); empty if
/// unknown.
std::string sampler_name(const std::string& given);
/// Whether `given` is a known but unsupported sampler (heun, lcm, …).
bool is_unsupported_sampler(const std::string& given);
/// Changes the config to the sampler `given`, as diffusers' from_config does, and sets the fields of the name, except
/// those in `fixed`. Sigmas are those of training unless the name contains karras; clipping is as in the config. For a
/// flow-matching model, euler is FlowMatchEulerDiscreteScheduler. Throws invalid_config if the sampler does not support
/// the model (flow matching or not).
void choose_sampler(nlohmann::json& config, const std::string& given, const std::set<std::string>& fixed);

}  // namespace md
