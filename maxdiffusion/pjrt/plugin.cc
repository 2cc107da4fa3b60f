// Opening a plugin: dlopen, version check, one-time initialisation.
#include "maxdiffusion/pjrt/plugin.h"

#include <dlfcn.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "maxdiffusion/base/address_space.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

// The order of functions in PJRT_Api is fixed since 0.57; every function used here is older.
constexpr int kMinimumMinor = 57;
// On two cores the CPU plugin trains a model with 6 million parameters in 0.9 GB, and crashes in various ways with
// less.
constexpr int64_t kAddressSpace = int64_t{1} << 30;

/// Buffers stderr during its lifetime, then writes it without one harmless line that libtpu prints at every log level.
class WithoutHarmlessLines {
 public:
  WithoutHarmlessLines() : captured_(::memfd_create("stderr", MFD_CLOEXEC)), stderr_(::dup(STDERR_FILENO)) {
    if (captured_ >= 0 && stderr_ >= 0) ::dup2(captured_, STDERR_FILENO);
  }
  ~WithoutHarmlessLines() {
    if (captured_ >= 0 && stderr_ >= 0) {
      std::fflush(stderr);
      ::dup2(stderr_, STDERR_FILENO);
      std::string text(static_cast<size_t>(std::max<off_t>(::lseek(captured_, 0, SEEK_END), 0)), '\0');
      if (::pread(captured_, text.data(), text.size(), 0) < 0) text.clear();
      for (size_t from = 0; from < text.size();) {
        const size_t to = std::min(text.find('\n', from), text.size() - 1) + 1;
        const std::string line = text.substr(from, to - from);
        if (line.find("hugepage_text.cc") == line.npos) std::fputs(line.c_str(), stderr);
        from = to;
      }
    }
    if (captured_ >= 0) ::close(captured_);
    if (stderr_ >= 0) ::close(stderr_);
  }
  WithoutHarmlessLines(const WithoutHarmlessLines&) = delete;

 private:
  int captured_, stderr_;
};

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
  // A plugin's state is global in the process, and so is the table of open plugins.
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<Plugin>> open;
  check(exists(path), Code::io, "plugin '{}': no such file", path);
  ::close(open_to_read(path));
  char* real = realpath(path.c_str(), nullptr);
  const std::string key = real ? real : path;
  std::free(real);
  std::lock_guard lock(mutex);
  if (auto it = open.find(key); it != open.end()) return it->second;

  if (const auto left = address_space_left(); left && *left < kAddressSpace)
    throw Error(Code::out_of_memory, fmt::format("plugin '{}': a limit (ulimit -v) leaves {} MiB of address space; at "
                                                 "least {} are needed",
                                                 key, *left >> 20, kAddressSpace >> 20))
        .note("try: ulimit -v unlimited");
  // Plugins log to stderr; show only warnings and errors by default.
  setenv("TF_CPP_MIN_LOG_LEVEL", "3", 0);
  std::optional<WithoutHarmlessLines> quiet;
  if (key.ends_with("/libtpu.so")) quiet.emplace();
  void* library = dlopen(key.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(Code::io, "plugin '{}': cannot be loaded: {}", key, dlerror());
  auto* get = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"));
  check(get != nullptr, Code::device, "plugin '{}': it exports no GetPjrtApi; expected a PJRT plugin", key);
  const PJRT_Api* api = get();
  check(api != nullptr, Code::device, "plugin '{}': GetPjrtApi returned nothing", key);
  const int major = api->pjrt_api_version.major_version, minor = api->pjrt_api_version.minor_version;
  if (major != PJRT_API_MAJOR || minor < kMinimumMinor)
    throw Error(Code::device, fmt::format("plugin '{}': implements PJRT API {}.{}; expected {}.{} or newer", key, major,
                                          minor, PJRT_API_MAJOR, kMinimumMinor))
        .note("try: a newer build of the plugin, or no plugin=, to use the one of the installed wheel");
  auto plugin = std::shared_ptr<Plugin>(new Plugin(key, api));
  open[key] = plugin;
  return plugin;
}

std::string Plugin::find(const std::string& hardware) {
  const PlatformDef& platform = platform_for(hardware);
  const char* env = std::getenv("MAXDIFFUSION_PLUGIN_DIR");
  const std::vector<std::string> folders = env && *env ? std::vector<std::string>{env} : wheel_folders();
  std::string lacking;
  for (const char* file : platform.plugin_files) {
    if (platform.lacking && !platform.lacking(file).empty()) {
      lacking = fmt::format("this processor has no {}, which {} needs", platform.lacking(file), file);
      continue;
    }
    for (const std::string& folder : folders) {
      std::string path = folder + "/" + file, flat = folder + path.substr(path.rfind('/'));
      if (exists(path)) return path;
      if (exists(flat)) return flat;
    }
  }
  Error e(Code::io, fmt::format("hardware: {}: no plugin under '{}'", hardware, fmt::join(folders, "', '")));
  for (const char* file : platform.plugin_files) e.note(fmt::format("looked for {}", file));
  if (!lacking.empty()) {
    const std::string_view other = platform.plugin_files.back();
    e.note(lacking).note(fmt::format("try: pip install xla-cpu-pjrt, or plugin=FOLDER/{}, of that wheel",
                                     other.substr(other.rfind('/') + 1)));
    throw e;
  }
  if (env && *env)
    e.note(fmt::format("try: unset MAXDIFFUSION_PLUGIN_DIR, or put the plugin of the wheel '{}' into that folder",
                       platform.wheel));
  else if (program_name() == "maxdiffusion")
    e.note(fmt::format("try: pip install {}, or unpack that wheel and set MAXDIFFUSION_PLUGIN_DIR", platform.wheel));
  else
    e.note(
        fmt::format("try: {} setup, which installs the wheel '{}', or unpack that wheel and set "
                    "MAXDIFFUSION_PLUGIN_DIR",
                    program_name(), platform.wheel));
  throw e;
}

}  // namespace md::pjrt
