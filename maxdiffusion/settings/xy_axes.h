// The key `xy`: values of one or two keys. Each combination is generated; a sheet shows them as rows and columns.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/settings/run_config.h"

namespace md {

/// One axis of a sheet.
struct XyAxis {
  std::string name;  // as written by the user: "cfg"
  std::string key;   // "guidance_scale"
  std::vector<std::string> values;
  /// "cfg: 7"
  std::string label(size_t value) const { return name + ": " + values[value]; }
};

/// Parses "cfg:3,5,7;sampler:euler,dpmpp_2m": the columns, then the rows, if any. Values are separated by commas
/// outside of brackets and quotes; quotes around a whole value are removed; prompts are taken literally. Names are
/// sampling keys (SampleKeys, SchedulerKeys, StepCacheKeys, LoraKeys, a ControlNet's numbers), those of a line of
/// prompt_file (seed, steps, cfg_scale, sampler_name), cfg or sampler. Throws invalid_config for other names.
std::vector<XyAxis> xy_axes(const std::string& text);
/// The configs of all combinations, row by row. Throws invalid_config if a key does not accept its value.
std::vector<RunConfig> xy_configs(const RunConfig& config, const std::vector<XyAxis>& axes);

}  // namespace md
