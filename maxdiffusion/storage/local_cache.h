// The folder of this machine that stands for a location in a bucket: what is written there is made here first, and what
// was read from there is kept here.
#pragma once

#include <string>

namespace md {

/// `location` itself where it is local; otherwise a path below $XDG_CACHE_HOME/maxdiffusion/places (or ~/.cache), the
/// same for the same location, and that of what lies below a location lies below its own. Throws io where there is no
/// folder for caches, or the location leads out of it.
std::string local_cache_path(const std::string& location);

/// `location` itself where it is local; otherwise its staging, with a copy of the file, or of every file below it. What
/// is there in the same size, and not older, is not fetched again. Throws io where there is nothing.
std::string local_copy(const std::string& location);

}  // namespace md
