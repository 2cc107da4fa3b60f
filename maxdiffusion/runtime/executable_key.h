// What an executable depends on, as one name: the key of the executable cache.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/executable.h"

namespace md {

/// 32 hex digits that change with the program's text, the options, the devices (`devices` are those of
/// options.device_ids, in that order: id, process, slice, kind, coordinates), the plugin (`plugin_hash` is its file's),
/// the environment variables that the plugin reads itself (PlatformDef::environment; of one that names a file of flags,
/// the file), and, where code is compiled for that, the processor of this machine and
/// what the kernels gain from on it (kernels/processor.h).
std::string executable_key(const std::string& program, const pjrt::CompileOptions& options, const pjrt::Client& client,
                           const std::vector<pjrt::Device>& devices, const std::string& plugin_hash);

}  // namespace md
