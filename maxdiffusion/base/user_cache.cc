#include "maxdiffusion/base/user_cache.h"

#include <cstdlib>

namespace md {

std::string user_cache_folder() {
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg) return std::string(xdg) + "/maxdiffusion";
  if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + "/.cache/maxdiffusion";
  return "";
}

}  // namespace md
