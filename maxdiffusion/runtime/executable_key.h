// The key of the executable cache: a hash of all that an executable depends on.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/executable.h"

namespace md {

/// The compiler: a plugin for attached (pjrt::Client) or unattached (pjrt::Topology) devices.
struct Compiler {
  const pjrt::PlatformDef& platform;
  std::string version, plugin_hash;  // platform version; hash of its file
  std::vector<pjrt::Device> devices;
};

/// 32 hex digits that change with the program's text, the options, the devices (those of options.device_ids, in that
/// order: id, process, slice, kind, coordinates), the plugin, the environment variables that it reads
/// (PlatformDef::environment; if one names a file of flags, its content) and, for CPU code, the processor and its
/// features for kernels (kernels/processor.h). Throws invalid_config for an unknown device.
std::string executable_key(const std::string& program, const pjrt::CompileOptions& options, const Compiler& compiler);

}  // namespace md
