// Samplers by the words that people use (euler, dpmpp_2m_karras), and what a word makes of a scheduler_config.json.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <set>
#include <string>
#include <vector>

namespace md {

/// The words; each stands for a class of scheduler.h and some of its fields.
std::vector<std::string> sampler_names();
/// The word that `given` means in any spelling ("DPM++ 2M Karras", "Euler"), or the class that it is the name of
/// ("EulerDiscreteScheduler"); empty: neither.
std::string sampler_name(const std::string& given);
/// Whether `given` means a sampler of other programs that is not here (heun, lcm, …).
bool is_unsupported_sampler(const std::string& given);
/// Makes the config that of the sampler `given`, as diffusers' from_config would, and sets the fields that the word
/// stands for, except those in `fixed`. Levels are those of training unless the word says karras; nothing is clipped
/// unless the config says so. Of a config that flows, euler is flow matching's. Throws invalid_config where the sampler
/// cannot take the model, which flows or does not.
void choose_sampler(nlohmann::json& config, const std::string& given, const std::set<std::string>& fixed);

}  // namespace md
