// Short names of samplers (euler, dpmpp_2m_karras), and the scheduler_config.json of each.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <set>
#include <string>
#include <vector>

namespace md {

/// All names; each is a scheduler class with some of its fields.
std::vector<std::string> sampler_names();
/// The name of a sampler from `name` in any spelling ("DPM++ 2M Karras", "Euler"), or its class
/// ("EulerDiscreteScheduler"); empty if unknown.
std::string sampler_name(const std::string& name);
/// AUTOMATIC1111's names for a config's sampler and sigma schedule: "DPM++ 2M" and "Karras". Samplers without a name
/// there have their class; the training schedule is empty.
struct SamplerTitle {
  std::string sampler, schedule;
};
SamplerTitle sampler_title(const nlohmann::json& config);
/// The sigma_schedule of AUTOMATIC1111's schedule type "Automatic" for a sampler_name(): karras, exponential, or empty,
/// the levels of training. Source: the web UI's modules/sd_samplers_kdiffusion.py.
std::string automatic_schedule(const std::string& name);
/// A sigma_schedule: its value of the key, the web UI's title in settings of images, and a label that no other has.
struct SigmaScheduleTitle {
  const char *name, *title, *label;
};
const std::vector<SigmaScheduleTitle>& sigma_schedule_titles();
/// Whether the sampler of a sampler_name() steps over timesteps, and so has no sigma_schedule.
bool steps_over_timesteps(const std::string& name);
/// The sigma_schedule of a title of the web UI ("Karras", "Uniform") or a name of it or of ComfyUI ("karras",
/// "uniform", "normal"), in any case; empty: there is none. "Align Your Steps" has other levels for SDXL, which has two
/// text encoders.
std::string schedule_named(const std::string& title, bool two_text_encoders = false);
/// sampler_name() and the sigma_schedule of a title of the web UI that ends with one, as in "Euler a Karras"; the
/// schedule is empty if the sampler's name includes it, as dpmpp_2m_karras does. Both are empty if unknown.
struct WebUiSampler {
  std::string name, schedule;
};
WebUiSampler web_ui_sampler(const std::string& title);
/// Whether `name` is a known but unsupported sampler (dpm_fast, edm_euler, …).
bool is_unsupported_sampler(const std::string& name);
/// Changes the config to the sampler `name`, as diffusers' from_config does, and sets the fields of the name, except
/// those in `fixed`. Sigmas are those of training unless the name contains karras; clipping is as in the config. For a
/// flow-matching model, euler is FlowMatchEulerDiscreteScheduler. Throws invalid_config if the sampler does not support
/// the model (flow matching or not).
void choose_sampler(nlohmann::json& config, const std::string& name, const std::set<std::string>& fixed);

}  // namespace md
