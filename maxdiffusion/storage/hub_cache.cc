#include "maxdiffusion/storage/hub_cache.h"

#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/storage/hub.h"

namespace md {
namespace {

namespace fs = std::filesystem;

/// The snapshot's folder, which contains `only` unless that is empty.
std::string find(const std::string& name, const HubName& n, const std::string& variant, const std::string& only) {
  if (!is_hub_name(n.repository))
    throw Error(Code::io, fmt::format("there is no file or folder '{}'", name))
        .note("try: a local folder, or a name of the Hugging Face hub such as owner/name");
  std::string cached = cached_snapshot(n);
  const bool whole = !cached.empty() && (only.empty() || exists(cached + "/" + only));
  if (whole && (!n.checks || hub_is_offline())) return cached;
  if (hub_is_offline())
    throw Error(
        Code::io,
        fmt::format("there is no file or folder '{}', nor is it in the Hugging Face cache: '{}' holds no snapshot{}",
                    name, cache_entry(n), n.revision.empty() ? "" : " of '" + n.revision + "'"))
        .note("try: HF_HUB_OFFLINE=0, which downloads it");
  try {
    return download_snapshot(n, variant, only);
  } catch (const Error& e) {
    if (!whole) {
      Error all(e.code(),
                n.checks ? e.message() : fmt::format("there is no file or folder '{}', and {}", name, e.message()));
      for (const std::string& note : e.notes()) all.note(note);
      throw all;
    }
    log_warning("{}; the cached snapshot is used", e.message());
    return cached;
  }
}

}  // namespace

std::string local_folder(const std::string& name, const std::string& revision, const std::string& kind,
                         const std::string& variant) {
  if (fs::is_directory(name)) return name;
  return find(name, hub_name(name, revision, kind), variant, "");
}

std::string local_file(const std::string& name, const std::string& file, const std::string& revision) {
  if (fs::is_directory(name)) return name + "/" + file;
  return find(name, hub_name(name, revision), "", file) + "/" + file;
}

}  // namespace md
