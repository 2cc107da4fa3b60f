// The folder of this program's cache.
#pragma once

#include <string>

namespace md {

/// $XDG_CACHE_HOME/maxdiffusion or ~/.cache/maxdiffusion; "" if neither XDG_CACHE_HOME nor HOME is set.
std::string user_cache_folder();

}  // namespace md
