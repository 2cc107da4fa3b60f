// Plugin: a shared library with the PJRT C API, opened once and never closed (plugins cannot be unloaded).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

struct PJRT_Api;

namespace md::pjrt {

/// Named values of the C API: client options, plugin and device attributes.
using Option = std::variant<std::string, int64_t, std::vector<int64_t>, float, bool>;
using Options = std::map<std::string, Option>;

class Plugin {
 public:
  /// Opens and initialises the library; the same path gives the same plugin. Throws io when it is missing or cannot be
  /// loaded, device if it is not a plugin or its API is too old.
  static std::shared_ptr<Plugin> load(const std::string& path);
  /// The library for `hardware` (cpu, gpu, tpu) that this processor can run, searched in $MAXDIFFUSION_PLUGIN_DIR, else
  /// in wheel_folders(). Throws io naming the folders and the wheel that contains it.
  static std::string find(const std::string& hardware);

  const std::string& path() const { return path_; }
  const PJRT_Api* api() const { return api_; }
  int api_major() const;
  int api_minor() const;
  /// xla_version, stablehlo_current_version and the like; may be absent.
  const Options& attributes() const { return attributes_; }

 private:
  Plugin(std::string path, const PJRT_Api* api);
  std::string path_;
  const PJRT_Api* api_;
  Options attributes_;
};

}  // namespace md::pjrt
