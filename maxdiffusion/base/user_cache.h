// Where this program may keep files between runs.
#pragma once

#include <string>

namespace md {

/// $XDG_CACHE_HOME/maxdiffusion or ~/.cache/maxdiffusion; "" where the environment names neither.
std::string user_cache_folder();

}  // namespace md
