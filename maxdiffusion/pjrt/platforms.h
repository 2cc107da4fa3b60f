// Properties of each kind of hardware: one record per kind, one file per record.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "maxdiffusion/base/dtype.h"
#include "maxdiffusion/pjrt/plugin.h"

namespace md::pjrt {

struct Device;

/// Bandwidths of a device, bytes per second.
struct DeviceRates {
  double memory;   // of its memory
  double axis;     // to the other devices along one mesh axis of a slice (TPU: both directions of a ring; GPU: NVLink)
  double network;  // to other slices or hosts
  double cycles = 0;  // of a TPU's core; 0: its compiler says no cycles
  double host = 0;    // from its host's memory; 0: not known
};

/// A named set of compiler options.
struct FlagSet {
  const char* name;
  std::vector<std::pair<const char*, const char*>> flags;
};

/// A compiler option of programs that call a function of the vendor's.
struct CallFlag {
  const char* call;  // the custom call's target
  const char* flag;
  const char* value;
  const char* consequence;  // for the log
};

struct PlatformDef {
  const char* hardware;                   // as in the config
  std::vector<const char*> plugin_files;  // inside the folder of unpacked wheels, best first
  const char* wheel;                      // contains the first of them
  /// Options for the client in addition to the caller's, which take precedence. Null: none.
  Options (*client_options)(const Options& of_caller);
  std::vector<std::pair<const char*, const char*>>
      compile_flags;                                            // for the compiler; those of the config take precedence
  std::vector<CallFlag> call_flags;                             // before them
  std::vector<std::pair<const char*, const char*>> lean_flags;  // instead, for programs that minimize memory
  std::vector<std::pair<const char*, const char*>> host_flags;  // also, for programs with inputs in the host's memory
  std::vector<FlagSet> flag_sets;                               // by name; those of the config take precedence
  std::vector<const char*> environment;  // variables that the plugin reads and that change compilation
  /// Dense FLOP/s of one device for matrix products of this type; absent when not known for the kind.
  std::optional<double> (*peak_flops)(std::string_view device_kind, DType type);
  std::optional<DeviceRates> (*rates)(std::string_view device_kind);
  /// Whether a device multiplies 8-bit floats, in hardware or emulated by its compiler.
  bool (*has_float8)(const Device& device);
  bool memory_is_the_hosts;  // devices compute in memory that the host reads and writes
  const char* ffi_platform;  // name under which custom-call handlers are registered; null: none
  /// Description of an unattached device for the compiler (create option target_config of a topology), by its name in
  /// the config; throws invalid_config with the known names. Null: implied by the topology's name.
  std::string (*target)(std::string_view device) = nullptr;
  /// Why no such device is attached, found without loading the plugin, which may block for minutes; empty: one may be
  /// attached. `root`: parent of /dev and /sys, for tests. Null: always attached.
  std::string (*absent)(const std::string& root) = nullptr;
  /// What this machine's processor lacks for one of the plugin_files; empty: nothing. Null: none needs much.
  std::string (*lacking)(std::string_view plugin_file) = nullptr;
};

extern const PlatformDef kCpuPlatform, kGpuPlatform, kTpuPlatform;

const std::vector<const PlatformDef*>& platforms();
/// Throws invalid_config with the known names.
const PlatformDef& platform_for(std::string_view hardware);

}  // namespace md::pjrt
