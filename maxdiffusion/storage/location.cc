#include "maxdiffusion/storage/location.h"

namespace md {

bool is_remote(const std::string& location) { return location.starts_with("gs://") || location.starts_with("s3://"); }

LocationParts split_location(const std::string& location) {
  if (!is_remote(location)) return {location, ""};
  // The '?' of a pattern is not followed by '='.
  const size_t q = location.rfind('?');
  if (q == std::string::npos || location.find('=', q) == std::string::npos) return {location, ""};
  return {location.substr(0, q), location.substr(q)};
}

std::string sibling(const std::string& location, const std::string& name) {
  const LocationParts p = split_location(location);
  const size_t slash = p.path.rfind('/');
  return (slash == std::string::npos ? "" : p.path.substr(0, slash + 1)) + name + p.query;
}

std::string below(const std::string& location, const std::string& name) {
  const LocationParts p = split_location(location);
  return p.path + (p.path.ends_with('/') ? "" : "/") + name + p.query;
}

bool has_secret(const std::string& locations) {
  for (size_t start = 0; (start = locations.find("://", start)) != std::string::npos;) {
    start += 3;
    const std::string user = locations.substr(start, locations.find_first_of("/,", start) - start);
    if (user.find(':') < user.find('@') && user.find('@') != std::string::npos) return true;
  }
  return false;
}

std::string shown(const std::string& location) {
  std::string path = split_location(location).path;
  const size_t scheme = path.find("://"), at = path.find('@');
  if (scheme == std::string::npos || at == std::string::npos || at > path.find('/', scheme + 3)) return path;
  return path.substr(0, scheme + 3) + path.substr(at + 1);
}

}  // namespace md
