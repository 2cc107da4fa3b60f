#include "maxdiffusion/storage/local_cache.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/user_cache.h"
#include "maxdiffusion/storage/write.h"

namespace md {

std::string local_cache_path(const std::string& location) {
  if (!is_remote(location)) return location;
  const std::string cache = user_cache_folder();
  check(!cache.empty(), Code::io, "'{}': no folder for the local copies of its files; try: XDG_CACHE_HOME=FOLDER",
        shown(location));
  // Another server may have a bucket with this name.
  std::string server = split_location(location).query;
  for (const char* name :
       {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "CLOUD_STORAGE_EMULATOR_ENDPOINT", "STORAGE_EMULATOR_HOST"})
    if (const char* value = std::getenv(name); value && (name[0] == 'A') == location.starts_with("s3:"))
      server += std::string(" ") + value;
  std::filesystem::path path = shown(location).substr(5);
  check(std::ranges::none_of(path, [](const auto& part) { return part == ".." || part == "."; }), Code::io,
        "'{}': '.' and '..' are not names in a bucket", shown(location));
  if (!path.has_filename()) path = path.parent_path();
  return cache + "/places/" + location.substr(0, 2) + "/" +
         (server.empty() ? "" : content_hash(server).substr(0, 8) + "/") + path.string();
}

std::string local_copy(const std::string& location) {
  if (!is_remote(location)) return location;
  std::string local = local_cache_path(location);
  const std::string root = split_location(location).path;
  for (const FoundFile& f : list_inputs(location)) {
    const std::string path = local + split_location(f.location).path.substr(root.size());
    const std::optional<FoundFile> local_file = find_file(path);
    if (!local_file || local_file->size != f.size || local_file->modified < f.modified) get_file(f, path);
  }
  return local;
}

}  // namespace md
