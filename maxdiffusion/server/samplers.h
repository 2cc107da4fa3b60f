// The web UI's names (AUTOMATIC1111) for samplers.
#pragma once

#include <string>
#include <vector>

namespace md {

/// One name per sampler: "Euler a", "DPM++ 2M", …; sampler_name accepts all of them.
const std::vector<std::string>& sampler_titles();

}  // namespace md
