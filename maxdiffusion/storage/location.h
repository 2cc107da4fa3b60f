// Locations of files: a path, or a URI of the schemes gs:// and s3:// with the options that Arrow reads from its query
// (endpoint_override=…, region=…, scheme=http). Credentials are in the URI ("gs://anonymous@bucket/…",
// "s3://key:secret@bucket/…") or the environment.
#pragma once

#include <string>

namespace md {

bool is_remote(const std::string& location);

struct LocationParts {
  std::string path;   // with scheme and user
  std::string query;  // "?…" of a URI, or ""
};
LocationParts split_location(const std::string& location);
/// The sibling `name` of the file `location`.
std::string sibling(const std::string& location, const std::string& name);
/// `location` / `name`.
std::string below(const std::string& location, const std::string& name);
/// Whether one of several comma-separated locations holds a secret ("s3://key:secret@…").
bool has_secret(const std::string& locations);
/// The location without user, key and query, for messages.
std::string shown(const std::string& location);

}  // namespace md
