// Local copies of files in object stores: files are written locally before the upload, and downloads are cached.
#pragma once

#include <string>

namespace md {

/// The local path for a location: `location` itself if it is local, else a path below
/// $XDG_CACHE_HOME/maxdiffusion/places (or ~/.cache). It is stable, and keeps the hierarchy of locations. Throws io if
/// there is no cache folder or the location contains "..".
std::string local_cache_path(const std::string& location);

/// `location` itself if it is local; else downloads the file, or every file below it, and returns
/// local_cache_path(location). A local file of the same size that is not older is not downloaded again. Throws io if
/// the location is empty.
std::string local_copy(const std::string& location);

}  // namespace md
