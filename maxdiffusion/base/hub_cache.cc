#include "maxdiffusion/base/hub_cache.h"

#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"

namespace md {
namespace {

namespace fs = std::filesystem;

std::string cache_root() {
  auto set = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (std::string root = set("HF_HUB_CACHE"); !root.empty()) return root;
  if (std::string home = set("HF_HOME"); !home.empty()) return home + "/hub";
  const std::string home = set("HOME");
  return home.empty() ? "" : home + "/.cache/huggingface/hub";
}

/// "owner/name", without anything that could lead out of the cache.
bool is_hub_name(const std::string& name) {
  const size_t slash = name.find('/');
  return slash != std::string::npos && slash > 0 && slash + 1 < name.size() &&
         name.find('/', slash + 1) == std::string::npos && name[0] != '.' && name.find("..") == std::string::npos &&
         name.find(':') == std::string::npos;
}

/// Empty where this revision is not there.
std::string snapshot(const std::string& entry, const std::string& revision) {
  if (revision.find("..") != std::string::npos) return "";
  std::string commit = revision;
  if (const std::string ref = entry + "/refs/" + revision; fs::is_regular_file(ref)) commit = read_file(ref);
  while (!commit.empty() && std::isspace(static_cast<unsigned char>(commit.back()))) commit.pop_back();
  if (commit.empty() || commit.find('/') != std::string::npos) return "";
  const std::string folder = entry + "/snapshots/" + commit;
  return fs::is_directory(folder) ? folder : "";
}

}  // namespace

std::string local_folder(const std::string& name, const std::string& revision, const std::string& kind) {
  if (fs::is_directory(name)) return name;
  const std::string root = cache_root();
  Error missing(Code::io, fmt::format("there is no folder '{}'", name));
  if (!is_hub_name(name)) throw missing.note("try: a local folder, or a name of the Hugging Face hub that is cached");
  std::string entry = kind + "--" + name;
  entry.replace(entry.rfind('/'), 1, "--");
  entry = root + "/" + entry;
  if (!revision.empty()) {
    if (std::string found = snapshot(entry, revision); !found.empty()) return found;
    if (fs::is_directory(entry)) log_warning("'{}': revision '{}' is not cached; main is taken", name, revision);
  }
  if (std::string found = snapshot(entry, "main"); !found.empty()) return found;
  missing.note(fmt::format("nor is it in the Hugging Face cache: '{}' holds no snapshot", entry));
  throw missing.note(
      fmt::format("try: huggingface-cli download {}{}", kind == "datasets" ? "--repo-type dataset " : "", name));
}

}  // namespace md
