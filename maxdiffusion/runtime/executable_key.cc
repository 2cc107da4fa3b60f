#include "maxdiffusion/runtime/executable_key.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/kernels/processor.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md {
namespace {

/// The processor properties that CPU code depends on: it must not run on another processor, or where kernels are
/// selected differently.
std::string processor_of_machine() {
  std::string s;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();)
    if (line.starts_with("model name") || line.starts_with("flags") || line.starts_with("Features")) s += line;
  return s + processor().describe();
}

std::string environment(const pjrt::PlatformDef& platform) {
  std::string s;
  for (const char* name : platform.environment) {
    const char* value = std::getenv(name);
    if (!value || !*value) continue;
    s += fmt::format("{}={}\n", name, value);
    if (*value != '-' && std::filesystem::is_regular_file(value)) s += read_file(value) + "\n";
  }
  return s;
}

}  // namespace

std::string executable_key(const std::string& program, const pjrt::CompileOptions& options, const Compiler& compiler) {
  std::string s = program;
  auto add = [&s](const std::string& part) { s += '\0' + part; };
  add(options.serialize());
  add(compiler.plugin_hash);
  add(compiler.platform.hardware + (" " + compiler.version));
  for (int id : options.device_ids) {
    const auto d = std::ranges::find(compiler.devices, id, &pjrt::Device::id);
    check(d != compiler.devices.end(), Code::invalid_config, "compile: device {} is not among the plugin's", id);
    add(fmt::format("{} {} {} {} {}", d->id, d->process, d->slice, d->kind, fmt::join(d->coords, ",")));
  }
  add(environment(compiler.platform));
  if (&compiler.platform == &pjrt::kCpuPlatform) add(processor_of_machine());
  return content_hash(s);
}

}  // namespace md
