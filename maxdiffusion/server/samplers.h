// The web UI's names (AUTOMATIC1111) for samplers and for the spacings of their noise levels.
#pragma once

#include <string>
#include <vector>

namespace md {

/// One name per sampler: "Euler a", "DPM++ 2M", …; sampler_name accepts all of them.
const std::vector<std::string>& sampler_titles();

struct LevelSpacing {
  const char *name, *label;  // value of the key sigma_schedule; name in the web UI
};
const std::vector<LevelSpacing>& level_spacings();

}  // namespace md
