// Opening a plugin: dlopen, version check, one-time initialisation.
#include "maxdiffusion/pjrt/plugin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

// 0.57 put the functions of PJRT_Api in the order they have now; every function used here is older.
constexpr int kMinimumMinor = 57;

}  // namespace

Plugin::Plugin(std::string path, const PJRT_Api* api) : path_(std::move(path)), api_(api) {
  PJRT_Plugin_Initialize_Args init{};
  PJRT_CALL(api_, PJRT_Plugin_Initialize, init);
  PJRT_Plugin_Attributes_Args attributes{};
  PJRT_CALL(api_, PJRT_Plugin_Attributes, attributes);
  attributes_ = from_named_values(attributes.attributes, attributes.num_attributes);
}

int Plugin::api_major() const { return api_->pjrt_api_version.major_version; }
int Plugin::api_minor() const { return api_->pjrt_api_version.minor_version; }

std::shared_ptr<Plugin> Plugin::load(const std::string& path) {
  // A plugin's state is the process's, whatever we do, so the table of open ones is too.
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<Plugin>> open;
  check(exists(path), Code::io, "plugin '{}': no such file", path);
  ::close(open_to_read(path));
  char* real = realpath(path.c_str(), nullptr);
  const std::string key = real ? real : path;
  std::free(real);
  std::lock_guard lock(mutex);
  if (auto it = open.find(key); it != open.end()) return it->second;

  // Plugins narrate on stderr; warnings and worse are enough unless the user says otherwise.
  setenv("TF_CPP_MIN_LOG_LEVEL", "3", 0);
  void* library = dlopen(key.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(Code::io, "plugin '{}': cannot be loaded: {}", key, dlerror());
  auto* get = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"));
  check(get != nullptr, Code::device, "plugin '{}': exports no GetPjrtApi, so it is no PJRT plugin", key);
  const PJRT_Api* api = get();
  check(api != nullptr, Code::device, "plugin '{}': GetPjrtApi returned nothing", key);
  const int major = api->pjrt_api_version.major_version, minor = api->pjrt_api_version.minor_version;
  if (major != PJRT_API_MAJOR || minor < kMinimumMinor)
    throw Error(Code::device, fmt::format("plugin '{}': speaks PJRT API {}.{}, expected {}.{} or newer", key, major,
                                          minor, PJRT_API_MAJOR, kMinimumMinor))
        .note("try: a newer build of the plugin");
  auto plugin = std::shared_ptr<Plugin>(new Plugin(key, api));
  open[key] = plugin;
  return plugin;
}

std::string Plugin::find(const std::string& hardware) {
  const PlatformDef& platform = platform_for(hardware);
  const char* env = std::getenv("MAXDIFFUSION_PLUGIN_DIR");
  const std::string folder = env && *env ? env : MD_DEPS_DIR;
  for (const char* file : platform.plugin_files) {
    std::string path = folder + "/" + file, flat = folder + path.substr(path.rfind('/'));
    if (exists(path)) return path;
    if (exists(flat)) return flat;
  }
  Error e(Code::io, fmt::format("hardware: {}: no plugin under '{}'", hardware, folder));
  for (const char* file : platform.plugin_files) e.note(fmt::format("looked for {}", file));
  e.note(fmt::format("try: ./run, which installs the wheel '{}', or unpack that wheel and set MAXDIFFUSION_PLUGIN_DIR",
                     platform.wheel));
  throw e;
}

}  // namespace md::pjrt
