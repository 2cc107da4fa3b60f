// What an executable depends on, as one name: the key of the executable cache.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/executable.h"

namespace md {

/// What compiles: a plugin for devices that are there (pjrt::Client) or are not (pjrt::Topology).
struct Compiler {
  const pjrt::PlatformDef& platform;
  std::string version, plugin_hash;  // of its platform, in its own words; of its file
  std::vector<pjrt::Device> devices;
};

/// 32 hex digits that change with the program's text, the options, the devices (those of options.device_ids, in that
/// order: id, process, slice, kind, coordinates), the plugin, the environment variables that it reads itself
/// (PlatformDef::environment; of one that names a file of flags, the file), and, where code is compiled for that, the
/// processor of this machine and what the kernels gain from on it (kernels/processor.h).
/// Throws invalid_config for a device that the compiler does not have.
std::string executable_key(const std::string& program, const pjrt::CompileOptions& options, const Compiler& compiler);

}  // namespace md
